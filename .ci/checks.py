"""The checks behind .ci/run. Each is a function that raises when something does not hold, or returns a short note.

Only the standard library is used here: what is checked runs in the environment that the first check makes.
"""
import ast, concurrent.futures, hashlib, io, json, os, random, re, shutil, signal, subprocess, sys, tempfile, time, tokenize
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT/".ci"/".venv"
PYTHON = VENV/"bin"/"python"
CHECKS = {} # name → function, in the order they run
QUICKSTART_S, RATIO, EXCESS = 480, 1.25, 0.2 # budget [s]; validation loss over the floor: ratio, and excess [nats/token]


class Failed(Exception):
    "A check that does not hold, with what the reader needs to know"


class Skipped(Exception):
    "A check that this machine cannot make, and why"


def check(f): CHECKS[f.__name__.replace("_", "-")] = f


def environment(
    offline=False, # refuse the network?
    **extra, # further variables
)->dict:
    "What children see: our environment first, no settings of the caller's shell that would change Python"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_", "MKL_", "TINYLLM_"))}
    env |= {"PATH": f"{VENV/'bin'}{os.pathsep}{env.get('PATH', '')}", "VIRTUAL_ENV": str(VENV), "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    if offline: env["PYTHONPATH"] = str(ROOT/".ci"/"offline")
    return env | extra


def start(cmd, cwd=ROOT, env=None, **kw):
    "A child in a session of its own, so that it ends with all its children"
    return subprocess.Popen([str(c) for c in cmd], cwd=cwd, env=env or environment(), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=kw.pop("stderr", subprocess.STDOUT), text=True,
                            start_new_session=True, **kw)


def end(process, how=signal.SIGKILL):
    "Signal a child and its children"
    try: os.killpg(process.pid, how)
    except ProcessLookupError: pass


def sh(*cmd, cwd=ROOT, env=None, timeout=900, ok=(0,))->str: # output, both streams
    "Run to the end; a wrong exit code or too long a time fails the check"
    p = start(cmd, cwd, env)
    try: out, _ = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(p)
        raise Failed(f"{shown(cmd)}: no end after {timeout} s\n{tail(p.communicate()[0])}") from None
    if p.returncode not in ok: raise Failed(f"{shown(cmd)}: exit code {p.returncode}\n{tail(out)}")
    return out


def shown(cmd): return " ".join(str(c).replace(f"{VENV}/bin/", "") for c in cmd)
def tail(text, n=40): return "\n".join((text or "").rstrip().split("\n")[-n:])
def git(*args): return sh("git", "-c", f"safe.directory={ROOT}", *args)


def tree()->str:
    "State of the working tree: differences from HEAD and files git does not know"
    return git("status", "--porcelain", "-uall") + git("diff", "HEAD")


def must_not_change(
    what:str, # what was run in between
    before:str, # tree() before
):
    "Fail when the working tree is not what it was"
    after = tree()
    if after != before:
        lines = [l for l in after.split("\n") if l not in set(before.split("\n"))]
        raise Failed(f"{what} changed the working tree:\n" + "\n".join(lines[:60]))


def modules()->list:
    "Names of our modules"
    return sorted(f"tinyllm.{p.stem}" for p in (ROOT/"tinyllm").glob("*.py") if not p.stem.startswith("_"))


# ---------------------------------------------------------------- what a user installs

def pip_install(
    command:str, # as the README has it
):
    "Run an install command of the README's, with wheels only"
    if command not in (ROOT/"README.md").read_text(encoding="utf-8"): raise Failed(f"README.md does not say: {command}")
    words = command.replace("'", "").split()[1:]
    sh(PYTHON, "-m", "pip", "-q", *words, env=environment(PIP_ONLY_BINARY=":all:"), timeout=1800)
    sh(PYTHON, "-m", "pip", "check")


@check
def install():
    "README's first command, in a fresh environment"
    before = tree()
    sh(sys.executable, "-m", "venv", "--clear", VENV)
    pip_install("pip install -e .")
    must_not_change("pip install", before)


@check
def imports():
    "Each module alone, in a fresh process, without side effects"
    mods = modules()
    if not mods: raise Failed("no modules in tinyllm/")
    with tempfile.TemporaryDirectory() as empty:
        probe = lambda m: sh(PYTHON, ROOT/".ci"/"import_probe.py", m, cwd=empty, env=environment(offline=True), timeout=120)
        probe(mods[0]) # matplotlib's font cache, once
        with concurrent.futures.ThreadPoolExecutor(2) as pool: list(pool.map(probe, mods))
        if left := os.listdir(empty): raise Failed(f"importing leaves {left}")
    return f"{len(mods)} modules"


@check
def settings_are_read():
    "No setting that no module looks at"
    source = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT/"tinyllm").glob("*.py")}
    fields, used, config = [], "", source.pop("config")
    for node in ast.parse(config).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config") or node.name == "Config": continue
        fields += [f"{node.name}.{f.target.id}" for f in node.body if isinstance(f, ast.AnnAssign)]
        properties = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
        used += "\n".join(ast.get_source_segment(config, f) for f in properties)
    used += "\n".join(source.values())
    unread = [f for f in fields if not re.search(rf"\b{f.split('.')[1]}\b", used)]
    if unread: raise Failed(f"read by no module but config: {', '.join(unread)}")
    return f"{len(fields)} settings"


def signature_ends(
    tokens:list, # of a module, from `tokenize`
    line:int, # of the word `def`
)->int: # line of the colon behind the parameters and what is returned
    "Where a signature ends and the body begins"
    depth = 0
    for t in (t for t in tokens if t.start[0] >= line and t.type == tokenize.OP):
        depth += (t.string in "([{") - (t.string in ")]}")
        if t.string == ":" and not depth: return t.start[0]
    raise AssertionError(f"line {line} begins no function")


def results(f)->list: # values, None for a bare `return`
    "What a function may return or yield itself, without the functions inside it"
    found, todo = [], list(f.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)): continue
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)): found.append(node.value)
        todo += ast.iter_child_nodes(node)
    return [v for v in found if v is not None and not (isinstance(v, ast.Constant) and v.value is None)]


def undocumented(
    f, # a function
    comments:dict, # line → is the comment all that stands there?
    end:int, # line on which the signature ends
)->list: # what is missing, in words
    "Parameters and a returned value with neither an annotation nor a comment beside them"
    args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
    owner = {a.lineno: a for a in args} # a comment belongs to the last parameter of its line
    def told(a):
        if a.annotation is not None or a.arg in ("self", "cls", "ax", "ctx"): return True
        above = a.lineno - 1
        return owner[a.lineno] is a and (a.lineno in comments and a.lineno != end or comments.get(above) and above > f.lineno)
    faults = [f"parameter {a.arg}" for a in args if not told(a)]
    return faults + (["what is returned"] if results(f) and f.returns is None and end not in comments else [])


def without_docments(
    path:Path, # a module
)->list: # one line for each fault
    "Public names of one module that do not say what they are"
    source, faults = path.read_text(encoding="utf-8"), []
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {t.start[0]: not t.line[:t.start[1]].strip() for t in tokens if t.type == tokenize.COMMENT}
    def public(name): return not name.startswith("_")
    def visit(node, owner):
        name = f"{owner}{node.name}"
        if isinstance(node, ast.ClassDef):
            if not public(node.name): return
            if not ast.get_docstring(node): faults.append(f"{path.stem}.{name}: no docstring")
            if any("autograd.Function" in ast.unparse(b) for b in node.bases): return # its methods are for autograd to call
            for n in node.body:
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): visit(n, f"{name}.")
            return
        patched = next((a.annotation for a in node.args.args[:1] if any("patch" in ast.unparse(d) for d in node.decorator_list)), None)
        if patched is not None: # `self:Some` of @patch
            classes = [n.id for n in ast.walk(patched) if isinstance(n, ast.Name)]
            if not any(map(public, classes)): return
            name = f"{classes[0]}.{name}"
        if node.name != "__init__" and not public(node.name) or any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list): return
        missing = undocumented(node, comments, signature_ends(tokens, node.lineno))
        if node.name != "__init__" and not ast.get_docstring(node): missing.insert(0, "no docstring")
        if missing: faults.append(f"{path.stem}.{name}: {', '.join(missing)}")
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): visit(node, "")
    return faults


@check
def docments():
    "Each public name says what it does, and what its parameters and its result are"
    paths = [p for p in sorted((ROOT/"tinyllm").glob("*.py")) if p.stem not in ("__init__", "_modidx")]
    if faults := [f for p in paths for f in without_docments(p)]:
        raise Failed(f"{len(faults)} public names lack a docstring, or a comment or type beside a parameter or the result:\n" + "\n".join(faults))
    return f"{len(paths)} modules"


@check
def nothing_left_to_do():
    "No note to ourselves in notebooks, sources and pages"
    note, faults = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X)\b"), []
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        path = ROOT/name
        if path.suffix not in (".ipynb", ".py", ".md", ".qmd", ".yml", ".yaml", ".css", ".ini", ".c", ".h", "") or not path.is_file(): continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".ipynb": text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"]) # pictures are no words
        faults += [f"{name}: {line.strip()[:120]}" for line in text.split("\n") if note.search(line)]
    if faults: raise Failed("\n".join(faults))


def tinyllm(*args, cwd, timeout=600, offline=True):
    "Run the command line to its end: exit code, stdout, stderr, seconds"
    begin = time.perf_counter()
    p = start([VENV/"bin"/"tinyllm", *args], cwd, environment(offline=offline), stderr=subprocess.PIPE)
    try: out, err = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(p)
        raise Failed(f"tinyllm {shown(args)}: no end after {timeout} s\n{tail(''.join(p.communicate()))}") from None
    return p.returncode, out, err, time.perf_counter() - begin


def succeed(*args, cwd, timeout=600):
    "The same for a command that must succeed"
    code, out, err, seconds = tinyllm(*args, cwd=cwd, timeout=timeout)
    if code: raise Failed(f"tinyllm {shown(args)}: exit code {code}\n{tail(out)}\n{tail(err)}")
    return out, err, seconds


@check
def command_line_help():
    "--help answers at once: no torch, no matplotlib"
    code = ("import sys\nfrom tinyllm.launch import main\ntry: code = main(['--help'])\nexcept SystemExit as e: code = e.code\n"
            "sys.exit(code or ' '.join({'torch', 'matplotlib', 'transformers'} & set(sys.modules)) or 0)")
    with tempfile.TemporaryDirectory() as empty:
        sh(PYTHON, "-c", code, cwd=empty)
        out, _, seconds = succeed("--help", cwd=empty)
        module = sh(PYTHON, "-m", "tinyllm.launch", "--help", cwd=empty)
        if not out.strip() or not module.strip(): raise Failed("--help prints nothing")
        if seconds > 2.5: raise Failed(f"tinyllm --help took {seconds:.1f} s, more than 2.5 s")
        if left := os.listdir(empty): raise Failed(f"--help leaves {left}")
    return f"{seconds:.1f} s"


def rows(run:Path, event:str)->list:
    "The lines of a run's metrics.jsonl with one event"
    lines = (run/"metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["event"] == event]


def only_run(folder:Path)->Path:
    "The one run in a folder"
    runs = [p.parent for p in folder.glob("runs/*/metrics.jsonl")]
    if len(runs) != 1: raise Failed(f"{len(runs)} runs in runs/, not one")
    return runs[0]


@check
def quickstart():
    "README's second command, offline, in an empty folder: budget, distance from the floor, stories; then nothing to do"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        out, _, seconds = succeed("train", cwd=folder, timeout=2*QUICKSTART_S)
        run = only_run(folder)
        last = rows(run, "eval")[-1]
        loss, floor = last["val_loss"], last["floor_loss"]
        ratio, excess = loss/floor, loss - floor
        note = (f"{seconds:.0f} s, loss {loss:.3f}, floor {floor:.3f} nats/token ({last['val_bits_per_byte']:.3f}, "
                f"{last['floor_bits_per_byte']:.3f} bits/byte): ratio {ratio:.3f}, excess {excess:.3f}")
        stories = out.partition("\n\n")[2].strip() # below the figures
        print(f"     {note}\n     {stories[:600]}", flush=True)
        if not 1 <= ratio <= RATIO or excess > EXCESS: raise Failed(f"not within {RATIO} and {EXCESS}: {note}")
        if seconds > QUICKSTART_S: raise Failed(f"more than {QUICKSTART_S} s: {note}")
        if len(stories.split()) < 30: raise Failed(f"no story was printed:\n{out}")
        before = (run/"metrics.jsonl").read_bytes()
        _, err, _ = succeed("train", cwd=folder)
        if "up to date" not in err: raise Failed(f"a second call does not say 'up to date':\n{tail(err)}")
        if (run/"metrics.jsonl").read_bytes() != before: raise Failed("a second call trained again")
        ask = ("sample", run, "--prompt", "Once", "--num_samples", "2", "--max_new_tokens", "20", "--seed", "1")
        if succeed(*ask, cwd=folder)[0] != succeed(*ask, cwd=folder)[0]: raise Failed("tinyllm sample: one seed, two texts")
        succeed("plot", run, cwd=folder)
    return note


# ---------------------------------------------------------------- what may go wrong

BAD_INPUTS = { # arguments → a word of the one line that says what is wrong
    "train --model.dmi=64": "dim",
    "train --train.steps=many": "steps",
    "train --model.dim=65 --model.n_heads=4": "n_heads",
    "train --preset=quickstrat": "quickstart",
    "train --config=missing.yaml": "missing.yaml",
    "train --corpus.source=missing.txt": "missing.txt",
    "train --corpus.source=latin1.txt": "latin1.txt",
    "train --corpus.source=empty.txt": "empty.txt",
    "train --corpus.source=no_story.json": "no_story.json",
    "train --corpus.source=few.txt --tokenizer.vocab_size=4096": "vocab_size",
    "train --data.tokens=odd": "odd",
    "sample nowhere --prompt=Once": "nowhere",
    "smaple nowhere": "sample",
}

def bad_folder(folder:Path):
    "The files that the bad inputs name"
    (folder/"odd").mkdir()
    (folder/"odd"/"train_000000.bin").write_bytes(b"\1\0\2")
    (folder/"odd"/"val_000000.bin").write_bytes(b"\1\0\2")
    (folder/"latin1.txt").write_bytes("Once upon a time there was a caf\u00e9.\n".encode("latin-1")*50)
    (folder/"empty.txt").write_bytes(b"")
    (folder/"no_story.json").write_text('[{"story": "Once."}, {"text": "Twice."}]')
    (folder/"few.txt").write_text("\n".join(f"Tom has {i} cats." for i in range(40)))


def refused(args:str, word:str)->str: # what is wrong with how it was refused, if anything
    "One bad input, in a folder of its own"
    with tempfile.TemporaryDirectory() as folder:
        bad_folder(Path(folder))
        files = lambda: {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}
        before = files()
        code, out, err, _ = tinyllm(*args.split(), cwd=folder, timeout=180)
        said = re.search(r"^tinyllm: (.*)\Z", err.rstrip(), re.M) # what was done before may stand above it
        if code != 2: return f"{args}: exit code {code}, not 2\n{tail(err, 5)}"
        if not said: return f"{args}: the last line on stderr is not 'tinyllm: …'\n{tail(err, 5)}"
        if word not in said.group(1): return f"{args}: does not say {word!r}: {said.group(1)}"
        if left := files() - before: return f"{args}: leaves {sorted(map(str, left))}"
    return ""


@check
def bad_inputs():
    "Each refused with exit code 2 and one line that says what, where and how to mend; nothing left behind"
    with concurrent.futures.ThreadPoolExecutor(2) as pool: faults = list(filter(None, pool.map(refused, BAD_INPUTS, BAD_INPUTS.values())))
    if faults: raise Failed("\n".join(faults))
    return f"{len(BAD_INPUTS)} inputs"


STEPS = 30
SMALL = ["train", "--corpus.num_stories=1200", "--tokenizer.vocab_size=400", "--model.dim=32", "--model.n_layers=2",
         "--model.n_heads=2", "--model.n_kv_heads=1", "--model.hidden_dim=64", "--model.seq_len=384", "--model.dropout=0.1",
         f"--train.steps={STEPS}", "--train.tokens_per_step=1536", "--train.micro_batch_size=2", "--train.eval_every=10",
         "--train.eval_tokens=3072", "--train.log_every=1", "--train.save_every=3", "--train.threads=1", "--run.name=small"]
TIMES = {"time_s", "tokens_per_s", "step_ms", "mfu", "eta_s", "backward_ms", "comm_ms"} # fields of metrics.jsonl that may differ

def outcome(run:Path):
    "Final weights and log of a run, without times"
    weights = hashlib.sha256((run/"checkpoints"/"latest"/"model.safetensors").read_bytes()).hexdigest()
    lines = [json.loads(l) for l in (run/"metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    log = [{k: v for k, v in r.items() if k not in TIMES} for r in lines if r["event"] != "resume"]
    return weights, log


def must_equal(what, got, want):
    "Two outcomes are the same, bit for bit"
    if got[0] != want[0]: raise Failed(f"{what}: other final weights")
    for a, b in zip(got[1], want[1]):
        if a != b: raise Failed(f"{what}: other metrics\n{a}\n{b}")
    if len(got[1]) != len(want[1]): raise Failed(f"{what}: {len(got[1])} lines of metrics, not {len(want[1])}")


@check
def resume():
    "Stopped, terminated or killed at random, a resumed run is the unbroken run, bit for bit"
    rng, kills = random.Random(), int(os.environ.get("KILLS", 5)) # the full storm by hand: KILLS=20 .ci/run resume
    with tempfile.TemporaryDirectory() as top:
        folders = {n: Path(top)/n for n in ("whole", "stopped", "terminated", "killed")}
        for f in folders.values(): f.mkdir()
        run = lambda n: folders[n]/"runs"/"small"
        *_, seconds = succeed(*SMALL, cwd=folders["whole"])
        want = outcome(run("whole"))

        succeed(*SMALL, "--train.stop_at_step=7", cwd=folders["stopped"])
        succeed(*SMALL, "--resume", cwd=folders["stopped"])
        must_equal("stopped after 7 steps", outcome(run("stopped")), want)

        p = start([VENV/"bin"/"tinyllm", *SMALL], folders["terminated"], environment(offline=True))
        deadline = time.time() + 120
        while p.poll() is None and time.time() < deadline and not (run("terminated")/"checkpoints"/"latest").exists(): time.sleep(0.05)
        end(p, signal.SIGTERM)
        out, _ = p.communicate(timeout=60)
        if p.returncode: raise Failed(f"SIGTERM: exit code {p.returncode}, not 0\n{tail(out)}")
        succeed(*SMALL, "--resume", cwd=folders["terminated"])
        must_equal("after SIGTERM", outcome(run("terminated")), want)

        for _ in range(kills):
            p = start([VENV/"bin"/"tinyllm", *SMALL, "--resume"], folders["killed"], environment(offline=True))
            try: p.communicate(timeout=rng.uniform(0.2, 1)*seconds)
            except subprocess.TimeoutExpired: end(p)
            p.communicate()
        succeed(*SMALL, "--resume", cwd=folders["killed"])
        must_equal(f"after {kills} kills", outcome(run("killed")), want)
    return f"{kills} kills, {seconds:.0f} s unbroken"


def by_script(*words, timeout)->str: # its last line
    "A check that is a script of its own, which one may also run by hand; what it says is shown"
    out = sh(PYTHON, *words, timeout=timeout)
    print("     " + out.rstrip().replace("\n", "\n     "), flush=True)
    return out.rstrip().split("\n")[-1]


@check
def two_nodes():
    "Two network namespaces: a worker is killed, a machine goes silent (root only; .ci/two_nodes.py --scenes all)"
    return by_script(".ci/two_nodes.py", timeout=600)


@check
def storm():
    "Two processes, a few kills, a damaged checkpoint, a full disk (the whole storm: .ci/storm.py --kills 30)"
    return by_script(".ci/storm.py", "--kills", "4", timeout=900)


# ---------------------------------------------------------------- what a contributor needs

@check
def install_dev():
    "README's command for tests and site"
    pip_install("pip install -e '.[dev]'")


@check
def export():
    "The package is what the notebooks export"
    before = tree()
    sh(VENV/"bin"/"nbdev_export")
    must_not_change("nbdev_export", before)


@check
def clean():
    "Notebooks hold no execution noise"
    before = tree()
    sh(VENV/"bin"/"nbdev_clean")
    must_not_change("nbdev_clean", before)


@check
def outputs():
    "Stored outputs belong to the sources beside them"
    sh(PYTHON, ".ci/refresh.py", "--check")


@check
def readme():
    "README.md and .github/CONTRIBUTING.md are what their notebooks give"
    sh(PYTHON, ".ci/readme.py", "--check")


@check
def tests():
    "Every notebook, all flags but gpu, two at a time with one thread each"
    before, begun, times, log = tree(), {}, {}, []
    env = environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    p = start([VENV/"bin"/"nbdev_test", "--flags", "slow ddp browser", "--n_workers", "2", "--do_print"], env=env)
    for line in p.stdout:
        log.append(line)
        if m := re.match(r"(Starting|- Completed) .*?([^/\s]+\.ipynb)", line):
            now = time.perf_counter()
            if m.group(1) == "Starting": begun[m.group(2)] = now
            else:
                times[m.group(2)] = now - begun.get(m.group(2), now)
                print(f"     {m.group(2)}: {times[m.group(2)]:.0f} s", flush=True)
    if p.wait(): raise Failed("nbdev_test:\n" + tail("".join(log), 120))
    must_not_change("nbdev_test", before)
    slow = [n for n, s in times.items() if s > 120]
    return f"{len(times)} notebooks" + (f"; over 120 s: {', '.join(slow)}" if slow else "")


@check
def tests_from_nbs():
    "A notebook's test is the same from its own folder"
    sh(VENV/"bin"/"nbdev_test", "--path", "00_config.ipynb", "--n_workers", "0", cwd=ROOT/"nbs")


# ---------------------------------------------------------------- neighbours

LLAMA_CPP = "llama-cpp-python==0.3.36" # built from source: 4 minutes on two cores; LLAMA_CPP=no leaves it out, and says so

@check
def doors():
    "A run exported to transformers, llama2.c and llama.cpp, imported again: the same greedy story everywhere"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        succeed("train", "--corpus.num_stories=2000", "--tokenizer.vocab_size=400", "--model.dim=64", "--model.n_layers=2",
                "--model.n_heads=4", "--model.n_kv_heads=2", "--model.seq_len=256", "--train.steps=200",
                "--train.tokens_per_step=1024", "--train.micro_batch_size=4", "--train.eval_every=0", "--train.eval_tokens=4096",
                "--train.save_every=0", "--optim.lr=3e-3", "--optim.warmup_steps=20", "--run.name=r", cwd=folder)
        ask = ("--prompt", "Once upon a time", "--temperature=0", "--num_samples=1", "--max_new_tokens=200")
        story, bits = succeed("sample", "r", *ask, cwd=folder)[0], set()
        for to, out in dict(hf="hf", llama2c="m.bin", gguf="m.gguf").items():
            succeed("export", "r", f"--to={to}", f"--out={out}", cwd=folder)
            succeed("import", out, f"--out=runs/{to}", cwd=folder)
            if (told := succeed("sample", f"runs/{to}", *ask, cwd=folder)[0]) != story: raise Failed(f"{to} tells another story:\n{told}\n{story}")
            found = json.loads(succeed("eval", f"runs/{to}", "--on=builtin", "--limit=20", "--json", cwd=folder)[0])
            bits.add(round(found["bits_per_byte"], 5))
        if len(bits) > 1: raise Failed(f"bits per byte differ: {bits}")
        theirs = sh(PYTHON, "-c", "import sys, torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "model, words = (c.from_pretrained('hf') for c in (AutoModelForCausalLM, AutoTokenizer))\n"
            "ids = words('Once upon a time', return_tensors='pt')\n"
            "print('STORY', words.decode(model.generate(**ids, do_sample=False, max_new_tokens=200)[0], skip_special_tokens=True))",
            cwd=folder, env=environment(offline=True, HF_HUB_OFFLINE="1")).partition("STORY ")[2]
        if theirs.strip() != story.strip(): raise Failed(f"transformers tells another story:\n{theirs}\n{story}")
        if os.environ.get("LLAMA_CPP") == "no": return f"{bits.pop()} bits/byte; llama.cpp was left out"
        begin = time.perf_counter()
        sh(PYTHON, "-m", "pip", "-q", "install", LLAMA_CPP, env=environment(CMAKE_BUILD_PARALLEL_LEVEL="2"), timeout=1200)
        built = time.perf_counter() - begin
        (folder/"story.txt").write_text(story, encoding="utf-8")
        said = sh(PYTHON, ROOT/".ci"/"doors.py", folder/"m.gguf", folder/"story.txt", "Once upon a time", cwd=folder)
    return f"{bits.pop()} bits/byte by every road; llama.cpp ({built:.0f} s to build): {said.strip().splitlines()[-1]}"


@check
def docs():
    "The site is built without a warning, offline, every link leads somewhere, and twice the same"
    before, seen = tree(), []
    for _ in range(2):
        sh(PYTHON, ".ci/docs.py", env=environment(offline=True))
        files = sorted(p for p in (ROOT/"_docs").rglob("*") if p.is_file())
        seen.append({p.relative_to(ROOT).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})
    if differ := [n for n in seen[0].keys() | seen[1].keys() if seen[0].get(n) != seen[1].get(n)]:
        raise Failed(f"built twice, these differ: {', '.join(sorted(differ))}")
    must_not_change("building the site", before)
    return f"{sum(n.endswith('.html') for n in seen[0])} pages"


def get_chromium():
    "On a bare machine of ours, Debian's browser; elsewhere it is the owner's to install"
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if os.environ.get("CHROMIUM") or any(map(shutil.which, names)): return
    if not (os.environ.get("CI") and shutil.which("apt-get") and os.geteuid() == 0): return
    env = environment(DEBIAN_FRONTEND="noninteractive")
    try:
        sh("apt-get", "-qq", "update", env=env, timeout=300)
        sh("apt-get", "-qq", "install", "-y", "--no-install-recommends", "chromium", "fonts-liberation", env=env, timeout=900)
    except Failed as e: raise Skipped(f"no Chromium here, and it cannot be installed: {e}") from None


def in_browser(what:str, timeout:int):
    "What .ci/browser.py has to say; its pictures are kept in _shots/"
    get_chromium()
    p = start([PYTHON, ".ci/browser.py", what, "--shots", ROOT/"_shots"], env=environment())
    try: out, _ = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(p)
        raise Failed(f"the browser: no end after {timeout} s\n{tail(p.communicate()[0])}") from None
    if p.returncode == 3 and not os.environ.get("CI"): raise Skipped(tail(out))
    if p.returncode: raise Failed(tail(out))
    return f"{out.strip()}\npictures: _shots/"


@check
def browser():
    "In JupyterLab in a real browser: every notebook with widgets runs, each widget answers, a run is steered, a story streams"
    before = tree()
    try: return in_browser("notebooks", 2400)
    finally: must_not_change("the browser", before)


@check
def site():
    "The built site in a real browser: no error, no broken link or image, search, themes, telephone"
    if not (ROOT/"_docs"/"index.html").exists(): sh(PYTHON, ".ci/docs.py", env=environment(offline=True))
    return in_browser("site", 900)


@check
def tree_is_as_it_was():
    "After all of this, git sees nothing new"
    must_not_change("this run", TREE)


# ---------------------------------------------------------------- run them

def main(names):
    "Run checks by name (all without), count them"
    if names == ["--list"]:
        for name, f in CHECKS.items(): print(f"{name}: {f.__doc__}")
        return 0
    if unknown := [n for n in names if n not in CHECKS]:
        print(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    global TREE
    TREE, begin, passed, failed, skipped = tree(), time.perf_counter(), 0, [], []
    for name in names or CHECKS:
        started = time.perf_counter()
        try:
            note, ok = CHECKS[name]() or "", True
            passed += 1
        except Failed as e: note, ok = str(e), False
        except Skipped as e:
            print(f"skip {name}: {e}", flush=True)
            skipped.append(name)
            continue
        except Exception: note, ok = traceback.format_exc(), False # the check itself is wrong, or what it read
        if not ok: failed.append(name)
        mark, lines = "ok  " if ok else "FAIL", note.split("\n")
        print(f"{mark} {name} ({time.perf_counter() - started:.0f} s) {lines[0]}", *lines[1:], sep="\n     ", flush=True)
        if not ok and name == "install": break
    told = "".join(f"; {word}: {', '.join(names)}" for word, names in (("failed", failed), ("skipped", skipped)) if names)
    print(f"{(time.perf_counter() - begin)/60:.0f} minutes{told}")
    print(f"{passed} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
