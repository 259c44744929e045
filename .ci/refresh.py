"""Store fresh outputs in the notebooks, whose stored outputs are what the site and README show.

python .ci/refresh.py                       all notebooks, in order
python .ci/refresh.py nbs/03_data.ipynb     these only
python .ci/refresh.py --flags 'slow ddp'    flagged cells too (else they keep the outputs they have)
python .ci/refresh.py --check               run nothing: name stale, failed and unclean notebooks

Each notebook runs in a process of its own, in nbs/, without the cells that `eval: false` or a flag leaves out. Then it
is cleaned: no execution counts, no progress bars, no folders of this machine. In its metadata stands a hash of the
sources that the outputs belong to, so that --check sees a cell that was edited after its last run.
"""
import argparse, ast, hashlib, json, os, re, subprocess, sys, sysconfig, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "plain" # group of the cells without a flag
WIDGET = "application/vnd.jupyter.widget-view+json" # names a live widget by a random id


class RefreshError(Exception):
    "Something the reader of the message can mend"


def load(
    path:Path, # notebook
):
    "Read a notebook, or say in one line why it cannot be read"
    from execnb.nbio import read_nb
    name = os.path.relpath(path)
    try: text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e: raise RefreshError(f"{name}: cannot be read: {e}") from e
    mark = re.search(r"^(<{7}|>{7}) ", text, re.M)
    if mark: raise RefreshError(f"{name}: merge conflict at line {text.count(chr(10), 0, mark.start()) + 1}; "
                                f"mend it with nbdev_fix {name}")
    try: return read_nb(path)
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise RefreshError(f"{name}: not a notebook: {e}") from e


def flags_of(
    cell, # a cell
    all_flags, # the flags named by tst_flags
):
    "The flags a code cell carries; None when it is never run"
    lines = re.findall(r"^\s*#\s*\|\s*(.*?)\s*$", cell.source, re.M)
    if cell.cell_type != "code" or not cell.source.strip() or "nbdev_export(" in cell.source: return None
    if any(re.fullmatch(r"eval:\s*false", l, re.I) for l in lines): return None
    return {l.split()[0].rstrip(":") for l in lines if l} & set(all_flags)


def group(
    flags, # flags of a cell
)->str: # name of the cells with the same flags
    "Cells that run together, and whose outputs therefore age together"
    return " ".join(sorted(flags)) or PLAIN


def hashes(
    nb, # notebook
    all_flags, # the flags named by tst_flags
)->dict: # group of cells (their flags) → hash of their sources
    "What the outputs of each group of cells depend on"
    groups = {}
    for cell in nb.cells:
        flags = flags_of(cell, all_flags)
        if flags is not None: groups.setdefault(group(flags), []).append(cell.source.strip())
    return {k: hashlib.sha256("\0".join(v).encode()).hexdigest()[:12] for k, v in groups.items()}


# ---------------------------------------------------------------- machine paths

def machine_paths()->list: # (pattern, what is stored instead)
    "Folders that tell about this machine"
    tmp, purelib = Path(tempfile.gettempdir()), Path(sysconfig.get_paths()["purelib"])
    paths = [(purelib, "site-packages"), (ROOT, "tinyllm"), (ROOT.parent, ".."), (Path.home(), "~")]
    return [(re.compile(rf"{re.escape(str(tmp))}/[\w.-]+"), "TMP")] + \
           [(re.compile(re.escape(str(p)) + r"(?=/)"), new) for p, new in paths if len(p.parts) > 1]


def texts(
    o, # an output, or part of one
):
    "Every text in an output, images aside"
    if isinstance(o, str): yield o
    elif isinstance(o, list): yield from texts("".join(o)) if all(isinstance(x, str) for x in o) else ()
    elif isinstance(o, dict):
        for k, v in o.items():
            if not k.startswith(("image/", "metadata")): yield from texts(v)


def tidy_text(
    text:str, # text of an output
)->str:
    "Without machine paths, and only the last state of lines that were overwritten"
    text = re.sub(r"[^\n]*\r(?!\n)", "", text)
    for pattern, new in machine_paths(): text = pattern.sub(new, text)
    return text


def tidy(
    output, # one output of a cell
):
    "Clean one output; None when nothing of it should be stored"
    if output.output_type == "stream":
        text = "".join(output.text)
        if output.name == "stderr" and ("\r" in text or "%|" in text): return None # a progress bar
        output.text = tidy_text(text).splitlines(True)
    elif "data" in output:
        output.data.pop(WIDGET, None)
        for k, v in output.data.items():
            if k.startswith("text/"): output.data[k] = tidy_text("".join(v)).splitlines(True)
    return output


# ---------------------------------------------------------------- run

def run_notebook(
    path:Path, # notebook
    asked, # flags whose cells run as well
    all_flags, # the flags named by tst_flags
):
    "Execute one notebook in this process and write it back with its outputs"
    from execnb.nbio import write_nb
    from execnb.shell import CaptureShell
    from nbdev.clean import clean_nb
    nb = load(path)
    os.environ["IN_TEST"] = "1" # as under nbdev_test
    os.chdir(path.parent)
    sys.path.insert(0, str(ROOT))
    shell = CaptureShell(path)
    ran = {PLAIN}
    for i, cell in enumerate(nb.cells):
        flags = flags_of(cell, all_flags)
        if flags is None or flags - set(asked): continue
        ran.add(group(flags))
        cell.outputs = []
        shell.cell(cell)
        if shell.exc:
            raise RefreshError(f"{path.name}, cell {i}: {type(shell.exc).__name__}: {shell.exc}\n{cell.source}")
        cell.outputs = [o for o in map(tidy, cell.outputs) if o is not None]
    old, new = nb.metadata.get("tinyllm", {}).get("outputs_of", {}), hashes(nb, all_flags)
    nb.metadata["tinyllm"] = {"outputs_of": {k: new[k] if k in ran else old[k] for k in new if k in ran or k in old}}
    clean_nb(nb, allowed_metadata_keys=["tinyllm"])
    write_nb(nb, path)


# ---------------------------------------------------------------- check

SHOWS = re.compile(r"(^|\.)(print|display|show_doc|show_source|(plot|draw)_\w+|\w+_(html|widget))$") # calls that leave something to see

def speaks(
    source:str, # of a code cell
)->bool:
    "Must this cell have an output? Sure only of a last line that is a value, and of calls that show something"
    try: body = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M)).body
    except SyntaxError: return False
    def shows(n): return isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and bool(SHOWS.search(ast.unparse(n.value.func)))
    def prints(n): return shows(n) and ast.unparse(n.value.func) in ("print", "display")
    def always(nodes): # statements that are run in any case; loops are taken to have something to go through
        for n in nodes:
            yield n
            if isinstance(n, (ast.For, ast.With)): yield from always(n.body)
    if any(map(prints, always(body))): return True
    if not body or not isinstance(body[-1], ast.Expr) or source.rstrip().endswith(";"): return False
    value = body[-1].value
    return shows(body[-1]) or not isinstance(value, (ast.Call, ast.Constant, ast.Await, ast.Yield, ast.ListComp, ast.IfExp, ast.BoolOp))


def faults_of(
    path:Path, # notebook
    all_flags, # the flags named by tst_flags
)->list: # one line for each fault
    "What is wrong with the stored outputs of one notebook"
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    nb = load(path)
    faults, stored = [], nb.metadata.get("tinyllm", {}).get("outputs_of", {})
    for flags, new in hashes(nb, all_flags).items():
        if "gpu" in flags.split(): continue
        how = f"python .ci/refresh.py {name}" + ("" if flags == PLAIN else f" --flags '{flags}'")
        kind = "cells" if flags == PLAIN else f"cells flagged {flags}"
        if flags not in stored: faults.append(f"{name}: {kind} without a run whose outputs are stored; {how}")
        elif stored[flags] != new: faults.append(f"{name}: {kind} edited since their outputs were stored; {how}")
    for i, cell in enumerate(nb.cells):
        flags = flags_of(cell, all_flags)
        if flags is not None and "gpu" not in flags and not cell.get("outputs") and speaks(cell.source):
            faults.append(f"{name}, cell {i}: should show something, and no output is stored: {cell.source.strip().splitlines()[-1][:80]}")
        for o in cell.get("outputs", []):
            if o.output_type == "error": faults.append(f"{name}, cell {i}: stored error {o.get('ename')}: {o.get('evalue')}")
            for text in texts(o):
                for pattern, _ in machine_paths():
                    if m := pattern.search(text): faults.append(f"{name}, cell {i}: output names a folder of this machine: {m.group(0)}")
    return faults


def main():
    from nbdev.config import get_config
    from nbdev.doclinks import nbglob
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("notebooks", nargs="*", help="notebooks (all of nbs/ without)")
    p.add_argument("--flags", default="", help="space separated flags whose cells run as well")
    p.add_argument("--check", action="store_true", help="run nothing, report what is stale")
    p.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    cfg = get_config(path=ROOT)
    all_flags, asked = cfg.tst_flags.split(), args.flags.split()
    paths = [Path(n).resolve() for n in args.notebooks] or sorted(Path(f).resolve() for f in nbglob(cfg.nbs_path))
    failed = 0
    for path in paths:
        start = time.perf_counter()
        try:
            if args.check:
                faults = faults_of(path, all_flags)
                if faults: raise RefreshError("\n".join(faults))
            elif args.in_this_process: run_notebook(path, asked, all_flags)
            else:
                r = subprocess.run([sys.executable, __file__, "--in-this-process", "--flags", args.flags, str(path)],
                                   stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONHASHSEED": "0"})
                failed += r.returncode != 0
                if not r.returncode: print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
        except RefreshError as e:
            failed += 1
            print(e, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__": sys.exit(main())
