"Package metadata, all of it read from settings.ini."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

readme = here/"README.md"
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Education",
        "Natural Language :: English",
        *(f"Programming Language :: Python :: {v}" for v in ("3", "3.11", "3.12", "3.13", "3.14")),
    ],
    packages=find_packages(include=[cfg["lib_name"], cfg["lib_name"] + ".*"]),
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split(), "gguf": cfg["gguf_requirements"].split()},
    entry_points={
        "console_scripts": cfg["console_scripts"].split("\n"),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
    zip_safe=False,
)
