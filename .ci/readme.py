"""README.md from nbs/index.ipynb, .github/CONTRIBUTING.md from nbs/contributing.ipynb: python .ci/readme.py

--check: only say whether they are up to date.

Pictures among the outputs go to nbs/index_files/; links to notebooks lead to the published site.
"""
import argparse, base64, os, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT/"nbs"/"index_files"
MADE = {"README.md": "index.ipynb", ".github/CONTRIBUTING.md": "contributing.ipynb"} # file → notebook
ENDINGS = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
HIDDEN = {"hide", "export", "exporti", "default_exp"} # cells that the home page does not show either


def links(
    text:str, # Markdown of the notebook, whose links start in nbs/
    home:str, # address of the site
)->str: # the same, with links that work in README.md
    "Notebooks → pages of the site, local pictures and files → paths from the top folder"
    def one(m):
        start, path, tail = m.group(1), m.group(2), m.group(3) or ""
        if re.match(r"[a-z]+:|/", path): return m.group(0)
        if not path.endswith(".ipynb"): return start + os.path.normpath(f"nbs/{path}") + tail
        folder, _, name = path.rpartition("/")
        page = re.sub(r"^\d+[a-zA-Z0-9]*_", "", name).replace(".ipynb", ".html")
        return "/".join(filter(None, [start + home, folder, page])) + tail
    return re.sub(r'(\]\(|\bsrc=")([^)\s"#]+)(#[^)\s"]*)?(?=[)\s"])', one, text)


def code_cell(
    cell, # a code cell
    pictures:dict, # file name → bytes, added to
)->list: # pieces of Markdown
    "Source and stored outputs of one cell"
    lines = cell.source.split("\n")
    notes = {l.strip().lstrip("#| ").split(":")[0].strip(): l for l in lines if re.match(r"\s*#\s*\|", l)}
    if HIDDEN & {n.split()[0] for n in notes if n}: return []
    source = "\n".join(l for l in lines if not re.match(r"\s*#\s*\|", l)).strip()
    parts = [f"```python\n{source}\n```"] if source and "false" not in notes.get("echo", "") else []
    for out in cell.get("outputs", []):
        data = {"text/plain": out.text} if out.output_type == "stream" else out.get("data", {})
        kind = next((k for k in (*ENDINGS, "text/markdown", "text/plain") if k in data), None)
        if kind is None: continue
        content = "".join(data[kind])
        if kind in ENDINGS:
            name = f"figure-{len(pictures) + 1}.{ENDINGS[kind]}"
            pictures[name] = content.encode() if kind == "image/svg+xml" else base64.b64decode(content)
            width = out.metadata.get(kind, {}).get("width") # a stored figure has two pixels for one
            size = f' width="{width}"' if width else ""
            alt = re.search("<title>(.*?)</title>", content) if kind == "image/svg+xml" else None
            parts.append(f'<img src="{(PICTURES/name).relative_to(ROOT).as_posix()}" alt="{alt.group(1) if alt else ""}"{size}>')
        elif kind == "text/markdown": parts.append(content.strip())
        else: parts.append(f"```text\n{content.rstrip()}\n```")
    return parts


def render(
    notebook:str, # name of a notebook in nbs/
    pictures:dict, # file name → bytes, added to
)->str: # Markdown
    "The text of a file in the top folder"
    from execnb.nbio import read_nb
    from nbdev.config import get_config
    cfg = get_config(path=ROOT)
    parts = [f"<!-- made from nbs/{notebook} by .ci/readme.py; edit the notebook -->"]
    for cell in read_nb(cfg.nbs_path/notebook).cells:
        if cell.cell_type == "markdown": parts.append(links(cell.source.strip(), cfg.doc_host + cfg.doc_baseurl))
        elif cell.cell_type == "code": parts += code_cell(cell, pictures)
    return "\n\n".join(p for p in parts if p) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true", help="write nothing, fail when one is out of date")
    args = p.parse_args()
    pictures = {}
    files = {ROOT/name: render(notebook, pictures).encode() for name, notebook in MADE.items()}
    files |= {PICTURES/name: data for name, data in pictures.items()}
    old = {f: f.read_bytes() for f in [*(ROOT/name for name in MADE), *PICTURES.glob("*")] if f.is_file()}
    if args.check:
        if old == files: return 0
        differ = sorted(f.name for f in old.keys() | files.keys() if old.get(f) != files.get(f))
        print(f"{', '.join(differ)}: not what the notebooks give; python .ci/readme.py", file=sys.stderr)
        return 1
    for f in old.keys() - files.keys(): f.unlink()
    for f, data in files.items():
        f.parent.mkdir(exist_ok=True)
        f.write_bytes(data)
    return 0


if __name__ == "__main__": sys.exit(main())
