"""Build the site from the notebooks, offline: python .ci/docs.py  →  _docs/index.html

nbdev turns each notebook into a page source (_proc/), smalldocs turns those into HTML, and this script does what
neither does: page names without numbers, equations as MathML instead of a script from a CDN, links between pages
that stay on this site, the same bytes at each build, and a check of every internal link and anchor.
"""
import argparse, ast, html, importlib.util, json, os, re, shutil, subprocess, sys
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PROC, SITE = ROOT/"_proc", ROOT/"_docs"


class DocsError(Exception):
    "Something the reader of the message can mend"


def check_tools(
    names=("nbdev", "smalldocs", "latex2mathml", "tinyllm"), # modules the build imports
):
    "Refuse at once, and say how to mend it, when a tool is missing"
    missing = [n for n in names if importlib.util.find_spec(n) is None]
    if missing:
        raise DocsError(f"cannot build the site: {', '.join(missing)} not installed; "
                        "run pip install -e '.[dev]' in the project's folder (Quarto is not needed)")


def run_quietly(
    what:str, # step, for the message
    *cmd, # words of the command
    cwd=ROOT, # folder to run in
):
    "Run one step; a failure or any line on stderr is an error"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    r = subprocess.run([sys.executable, *cmd], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if r.returncode or r.stderr.strip():
        raise DocsError(f"{what} failed or warned (exit code {r.returncode}):\n{r.stdout[-2000:]}\n{r.stderr[-3000:]}".strip())


# ---------------------------------------------------------------- page sources

def clean_name(
    name:str, # file name such as "05_model.ipynb"
)->str: # "model.ipynb", the name nbdev's own links use
    "Page name without the number that orders the notebooks"
    return re.sub(r"^\d+[a-zA-Z0-9]*_", "", name)


def clean_links(
    text:str, # source of a page or of _quarto.yml
    names, # file names of all notebooks
)->str:
    "Point links to numbered notebooks at the clean page names"
    for name in names: text = re.sub(rf"(?<![\w.-]){re.escape(name)}", clean_name(name), text)
    return text


def mixed_imports()->list: # one line for each fault
    """Cells in which an import stands beside other code: nbdev runs every cell with an import to look up signatures, and
    there the other code has nothing to work on"""
    faults, nbs = [], ROOT/"nbs"
    for path in sorted(p for p in nbs.rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(nbs).parts)):
        for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or "nbdev_export(" in source: continue
            if re.search(r"^\s*#\s*\|\s*(exports?|exporti|exec_doc|eval:\s*false)\s*$", source, re.M): continue
            try: nodes = list(ast.walk(ast.parse(source)))
            except SyntaxError: continue # a magic or a shell line
            if any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes) and \
               any(isinstance(n, (ast.Expr, ast.Assign)) for n in nodes):
                faults.append(f"{path.relative_to(ROOT)}, cell {i}: an import shares the cell with other code; move it to a cell of its own")
    return faults


def make_sources():
    "Notebooks → _proc/, under their clean names"
    build = "from nbdev.doclinks import _build_modidx; from nbdev.serve import proc_nbs"
    run_quietly("processing the notebooks", "-c", f"{build}; _build_modidx(); proc_nbs(n_workers=2, force=True)")
    pages = sorted(PROC.rglob("*.ipynb"))
    numbered = [p.name for p in pages if clean_name(p.name) != p.name]
    clash = {p.parent/clean_name(p.name) for p in pages if p.name in numbered} & set(pages)
    if clash: raise DocsError(f"two notebooks make one page: {', '.join(p.name for p in clash)}; rename one")
    for page in [*pages, PROC/"_quarto.yml"]:
        source = clean_links(page.read_text(encoding="utf-8"), numbered)
        source = re.sub(r"(#{2,5} \w+\.)__(\w+)__", r"\1\\\\_\\\\_\2\\\\_\\\\_", source) # else Markdown takes `__repr__` for bold
        source = re.sub(r'\s*"output-file: [^"]*",', "", source) # Quarto's way to the same names; smalldocs has none
        page.unlink()
        page.with_name(clean_name(page.name)).write_text(source, encoding="utf-8")
    return [p.with_name(clean_name(p.name)) for p in pages]


# ---------------------------------------------------------------- equations

MATH = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)[^>]*katex[^>]*>(?:</script>)?\s*')

REMOTE = re.compile(r"""@import\s*(?:url\(\s*["']?(?:https?:)?//[^)]*\)|["'](?:https?:)?//[^"']*["'])[^;]*;""")

IN_CODE = re.compile(r"\[`([^`<>]+)`\]\(https?://[^)\s<]*\)") # a link that nbdev wrote into the comments of a signature, where it is none

FIGURE = re.compile(r'<img src="data:image/png;base64,([^"]+)"')

# what latex2mathml would pass over in silence, in words that it knows
REWRITES = [(r"\\(begin|end)\{aligned\}", r"\\\1{align*}"),
            (r"\\(math(?:bb|cal|frak|bf|rm|it|sf|tt))\s+([A-Za-z])", r"\\\1{\2}"),
            (r"\\(?:dfrac)\b", r"\\frac")]

def to_mathml(
    tex:str, # TeX between the delimiters
    block:bool, # on a line of its own?
)->str:
    "One equation as MathML"
    from latex2mathml.converter import convert
    src = tex.strip()
    for old, new in REWRITES: src = re.sub(old, new, src)
    try: out = convert(src, display="block" if block else "inline")
    except Exception as e: raise DocsError(f"cannot read the equation {tex!r}: {type(e).__name__} {e}") from e
    unknown = re.search(r"<m[ion][^>]*>(\\[A-Za-z]+|&)</m[ion]>", out)
    if unknown: raise DocsError(f"the equation {tex!r} uses {unknown.group(1)!r}, which latex2mathml does not know")
    return out


# ---------------------------------------------------------------- finished pages

def anchors_of(
    text:str, # a page's HTML
)->set: # every id a link may name
    "Anchors of a page"
    return set(re.findall(r'\s(?:id|name)="([^"]+)"', text))


def figure_sizes()->dict: # PNG in base64 → width at which the notebook shows it [px]
    "Figures are stored with two pixels for one; smalldocs does not read the size they are meant to have"
    outputs = [o for p in PROC.rglob("*.ipynb") for c in json.loads(p.read_text(encoding="utf-8"))["cells"] for o in c.get("outputs", [])]
    sizes = {"".join(o["data"]["image/png"]).strip(): o.get("metadata", {}).get("image/png", {}).get("width")
             for o in outputs if "image/png" in o.get("data", {})}
    return {k: v for k, v in sizes.items() if v}


def own_link(
    m:re.Match, # <a href="https://our.site/page.html#anchor">name</a>, written by nbdev around a name in backticks
    up:str, # way from the page to the top of the site
    anchors:dict, # page name → its anchors
    homes:dict, # anchor of an exported name → the page that defines it
)->str:
    """A link that stays on this site; a method without an entry of its own leads to its class, a private name nowhere.
    nbdev finds a name that several modules know in any of them: the page that defines it counts"""
    page, _, anchor = m.group(1).partition("#")
    if anchor not in anchors.get(page, ()): page = homes.get(anchor, page)
    known = anchors.get(page, ())
    for a in (anchor, anchor.rpartition(".")[0]):
        if a in known: return f'<a href="{up}{page}#{a}">{m.group(2)}</a>'
    return m.group(2) if anchor else f'<a href="{up}{page}">{m.group(2)}</a>'


ENTRY = re.compile(r'(blob/[^"/]+/tinyllm/)(\w+\.py#L\d+)("[^>]*>source</a></p>\s*<h\d [^>]*>)([^<]+)(?=</h)')

def exported()->dict: # page → (module, {exported function or class: its line})
    "What our modules export, by the page of the notebook that defines it"
    res = {}
    for path in sorted(p for p in (ROOT/"tinyllm").glob("*.py") if not p.stem.startswith("_")):
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
        names = next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
        lines = {n.name: n.lineno for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in names}
        notebook = re.search(r"File to edit: (?:\.\./)*nbs/(\S+)\.ipynb", text).group(1)
        res[f"{clean_name(notebook)}.html"] = path.stem, lines
    return res


def finish_site():
    "Equations, links to ourselves, and nothing that differs from one build to the next"
    from nbdev.config import get_config
    cfg = get_config(path=ROOT)
    link = re.compile(rf'<a href="{re.escape(cfg.doc_host + cfg.doc_baseurl)}/([^"]*)">(.*?)</a>', re.S)
    pages = {p.relative_to(SITE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(SITE.rglob("*.html"))}
    anchors, sizes, ours = {name: anchors_of(text) for name, text in pages.items()}, figure_sizes(), exported()
    homes = {n.lower(): page for page, (_, lines) in ours.items() for n in lines}
    for name, text in pages.items():
        up = "../"*name.count("/")
        try: text = MATH.sub(lambda m: to_mathml(html.unescape(m.group(2)), m.group(1) == "display"), text)
        except DocsError as e: raise DocsError(f"{name}: {e}") from e
        text = FIGURE.sub(lambda m: f'{m.group(0)} width="{sizes[m.group(1)]}"' if m.group(1) in sizes else m.group(0), text)
        text = link.sub(lambda m: own_link(m, up, anchors, homes), KATEX.sub("", text))
        module, lines = ours.get(name, ("", {}))
        def here(m): # the source of the module of this page, for nbdev may have found a namesake
            return m.group(1) + (f"{module}.py#L{lines[m.group(4)]}" if m.group(4) in lines else m.group(2)) + m.group(3) + m.group(4)
        text = ENTRY.sub(here, text)
        text = IN_CODE.sub(r"`\1`", text)
        (SITE/name).write_text(text, encoding="utf-8")
    for style in SITE.rglob("*.css"): # the themes ask a server for fonts; every browser has some that do
        style.write_text(REMOTE.sub("", style.read_text(encoding="utf-8")), encoding="utf-8")
    sitemap = SITE/"sitemap.xml" # its dates are those of this build's files, not of the pages
    if sitemap.exists(): sitemap.write_text(re.sub(r"\s*<lastmod>.*?</lastmod>", "", sitemap.read_text()))
    (SITE/".nojekyll").touch()


def purpose(
    page:Path, # source of a page in _proc/
)->tuple: # title, what it is for
    "What a page says it is, in the front matter that nbdev makes of its first cell"
    import yaml
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb": text = "".join(json.loads(text)["cells"][0]["source"])
    found = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    return found.get("title", page.stem), found.get("description", "")


def write_llms_txt():
    "llms.txt in learning order, each page with its purpose; smalldocs has them by name alone"
    import yaml
    from nbdev.config import get_config
    cfg = get_config(path=ROOT)
    lines = [f"# {cfg.title}", "", f"> {cfg.description}"]
    sidebar = yaml.safe_load((PROC/"_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    for part in sidebar:
        section = part if isinstance(part, dict) else dict(section="Start here", contents=[part])
        lines += ["", f"## {section['section']}", ""]
        for name in section["contents"]:
            title, says = purpose(PROC/name)
            address = f"{cfg.doc_host}{cfg.doc_baseurl}/{Path(name).with_suffix('.llms.md').as_posix()}"
            if not (SITE/name).with_suffix(".llms.md").exists(): raise DocsError(f"llms.txt: no such page: {name}")
            lines.append(f"- [{title}]({address})" + (f": {says}" if says else ""))
    (SITE/"llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- links

def check_links(
    site:Path=SITE, # folder of the built site
)->list: # one line for each fault
    "Every internal link and anchor leads somewhere, and no page needs the network to be shown"
    pages = {p: p.read_text(encoding="utf-8") for p in sorted(site.rglob("*.html"))}
    anchors = {p: anchors_of(t) for p, t in pages.items()}
    faults, linked = [], {site/"index.html"}
    for page, text in pages.items():
        where = page.relative_to(site)
        if MATH.search(text): faults.append(f"{where}: an equation was left as TeX")
        body = re.sub(r"<(pre|script|style)\b.*?</\1>", lambda m: m.group(0) if "<a " in m.group(0) else "", text, flags=re.S)
        heads = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\ssrc="([^"]+)"', text)
        heads += re.findall(r'<link\b[^>]*rel="(?:stylesheet|icon)"[^>]*href="([^"]+)"', text)
        for src in heads:
            if re.match(r"(https?:)?//", src): faults.append(f"{where}: needs the network for {src}")
        for href in heads + re.findall(r'<a\b[^>]*?\shref="([^"]*)"', body):
            href = html.unescape(href)
            parts = urlsplit(href)
            if parts.scheme or parts.netloc: continue
            target = page
            if parts.path:
                target = site/normpath((where.parent/unquote(parts.path)).as_posix())
                if target.is_dir(): target = target/"index.html"
            if target != page: linked.add(target)
            if not target.is_file(): faults.append(f"{where}: no such page or file: {href}")
            elif parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target]:
                faults.append(f"{where}: no such anchor: {href}")
    faults += [f"{p.relative_to(site)}: needs the network" for p in sorted(site.rglob("*.css")) if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", p.read_text("utf-8"))]
    return faults + [f"{p.relative_to(site)}: no page links to it; add it to nbs/_quarto.yml" for p in pages if p not in linked]


def check_sources(
    site:Path=SITE, # folder of the built site
)->list: # one line for each fault
    "Every exported function and class has an entry on its page, with a link to its source"
    faults = []
    for page, (module, lines) in exported().items():
        found = {m.group(4): m.group(2) for m in ENTRY.finditer((site/page).read_text(encoding="utf-8"))} if (site/page).is_file() else {}
        faults += [f"{page}: no entry with a link to the source of {module}.{n}" for n, line in lines.items() if found.get(n) != f"{module}.py#L{line}"]
    return faults


def build():
    "All of it"
    check_tools()
    if faults := mixed_imports(): raise DocsError("\n".join(faults))
    make_sources()
    built = PROC/"_docs"
    run_quietly("rendering the pages", "-m", "smalldocs.cli", "render", "--quiet", "--strict", str(PROC))
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(built, SITE)
    finish_site()
    write_llms_txt()
    faults = check_links() + check_sources()
    if faults: raise DocsError("\n".join(faults))
    print(f"{len(list(SITE.rglob('*.html')))} pages, every internal link and anchor, and the source of every exported name: {SITE.name}/index.html")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check-links", action="store_true", help="only check the links and entries of the site that is there")
    args = p.parse_args()
    try:
        if not args.check_links: build()
        elif faults := check_links() + check_sources(): raise DocsError("\n".join(faults))
    except DocsError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__": sys.exit(main())
