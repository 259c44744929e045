"""A group of training processes under torchrun, as seen from outside: started, watched, killed, swept up.

Used by storm.py and two_nodes.py. Whatever they start carries the pid of its script in its environment, in the name of
its folder and in the names of its network namespaces, so that a later run finds what a killed one left behind.
"""
import contextlib, json, os, re, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path
import checks
from checks import Failed, tail

ROOT = Path(__file__).resolve().parent.parent
MARK = "TINYLLM_CHECK" # variable of every process started here: pid of the script that started it
NAME = "tinyllm-check" # folders and namespaces: NAME-PID-…
PATIENCE = 180 # nothing new for so long is a hang [s]


# ---------------------------------------------------------------- what an earlier run left behind

def script_lives(
    pid:int, # of a script
)->bool:
    "Is it still one of our scripts?"
    try: return any(n in Path(f"/proc/{pid}/cmdline").read_bytes() for n in (b"storm.py", b"two_nodes.py"))
    except OSError: return False


def processes(
    owner=None, # pid of the script that started them; None: whichever script
)->dict: # pid → its environment
    "Processes that carry our mark"
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid(): continue
        try:
            env = Path(entry.path, "environ").read_bytes()
            if f"{MARK}=".encode() not in env or state_of(int(entry.name)) in "ZX": continue
        except OSError: continue # gone, or not ours to look at
        env = dict(v.split("=", 1) for v in env.decode(errors="replace").split("\0") if "=" in v)
        if MARK in env and (owner is None or env[MARK] == str(owner)): found[int(entry.name)] = env
    return found


def state_of(
    pid:int, # of a process
)->str: # R, S, D, T, Z or X
    "State of a process, X when there is none"
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError: return "X"


def parent_of(
    pid:int, # of a process
)->int: # 0 when it is gone
    "Parent of a process"
    try: return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError: return 0


def kill(
    *pids, # of processes
    how=signal.SIGKILL, # signal
):
    "Signal processes that may be gone already"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError): os.kill(pid, how)


def namespaces()->dict: # name → pid of the script that made it
    "Our network namespaces"
    if not shutil.which("ip"): return {}
    out = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {m.group(0): int(m.group(1)) for m in re.finditer(rf"^{NAME}-(\d+)-\w+", out, re.M)}


def mounts(
    under:Path, # a folder
)->list:
    "File systems mounted in a folder, innermost first"
    found = [l.split()[1] for l in Path("/proc/mounts").read_text().splitlines()]
    return sorted((m for m in found if m.startswith(f"{under}/")), key=len, reverse=True)


def sweep(
    owner:int, # pid of the script whose traces go
):
    "End a script's processes, remove its namespaces, mounts and folders"
    for _ in range(50):
        left = processes(owner)
        kill(*left)
        if not left: break
        time.sleep(0.1)
    for name, pid in namespaces().items():
        if pid == owner: subprocess.run(["ip", "netns", "del", name], check=False)
    for folder in Path(tempfile.gettempdir()).glob(f"{NAME}-{owner}-*"):
        for m in mounts(folder): subprocess.run(["umount", "-l", m], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def sweep_leftovers():
    "The same for every script that died without cleaning up"
    owners = {int(e[MARK]) for e in processes().values() if e[MARK].isdecimal()} | set(namespaces().values())
    for folder in Path(tempfile.gettempdir()).glob(f"{NAME}-*"):
        if m := re.match(rf"{NAME}-(\d+)-", folder.name): owners.add(int(m.group(1)))
    for owner in owners - {os.getpid()}:
        if script_lives(owner): continue
        print(f"sweeping up what the killed run {owner} left behind", flush=True)
        sweep(owner)


@contextlib.contextmanager
def workplace():
    "A folder that goes at the end, with everything else that was started or mounted, however the end comes"
    def leave(number, frame): raise SystemExit(128 + number)
    for s in (signal.SIGTERM, signal.SIGHUP): signal.signal(s, leave)
    sweep_leftovers()
    try: yield Path(tempfile.mkdtemp(prefix=f"{NAME}-{os.getpid()}-"))
    finally: sweep(os.getpid())


# ---------------------------------------------------------------- start and watch

def torchrun(
    options, # torchrun's own words
    settings, # words for tinyllm
    cwd:Path, # folder it runs in
    log:Path, # where both streams go, appended
    prefix=(), # words in front, such as ip netns exec
    **env, # further variables
)->subprocess.Popen:
    "Start torchrun with tinyllm's workers"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "TINYLLM_"))} | \
          {MARK: str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    cmd = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, "-m", "tinyllm.launch", *settings]
    with open(log, "ab") as out:
        return subprocess.Popen(cmd, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def workers(
    agent:int, # pid of a torchrun
)->dict: # rank → pid
    "Its workers that are alive"
    return {int(e["RANK"]): p for p, e in processes(os.getpid()).items() if "RANK" in e and parent_of(p) == agent}


def last_row(
    run:Path, # directory of a run
    since:float=0, # rows written before do not count [s since 1970]
)->dict: # empty when there is none
    "The newest whole line of metrics.jsonl"
    try:
        with open(run/"metrics.jsonl", "rb") as f:
            if os.fstat(f.fileno()).st_mtime < since: return {}
            f.seek(max(0, os.fstat(f.fileno()).st_size - 20_000))
            lines = f.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError): return {}


def must_equal_undisturbed(
    run:Path, # directory of a finished run
    want:tuple, # outcome of an undisturbed one
):
    "Final weights and log of both are the same, bit for bit; the launch that began a run is told in its first row"
    def plain(outcome): return outcome[0], [{k: v for k, v in r.items() if k not in ("launch", "commit")} for r in outcome[1]]
    checks.must_equal(run.name, plain(checks.outcome(run)), plain(want))


def steps_saved(
    run:Path, # directory of a run
)->list:
    "Steps of its checkpoints, ascending"
    return sorted(int(m.group(1)) for p in (run/"checkpoints").glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)))


def until(
    what:str, # for the message
    holds, # () → true when it has come about
    log:Path, # shown when it does not
    within:float=PATIENCE, # [s]
    pause:float=0.05, # between two looks [s]
):
    "Wait for something, or fail"
    deadline = time.monotonic() + within
    while not (found := holds()):
        if time.monotonic() > deadline: raise Failed(f"{what}: not within {within:.0f} s\n{tail(log.read_text())}")
        time.sleep(pause)
    return found


def ended(
    p:subprocess.Popen, # a torchrun
    what:str, # for the message
    log:Path, # shown when it does not end
    within:float=PATIENCE, # [s]
)->int: # its exit code
    "Wait for its end"
    try: return p.wait(within)
    except subprocess.TimeoutExpired: raise Failed(f"{what}: no end after {within:.0f} s\n{tail(log.read_text())}") from None


def none_left(
    what:str, # for the message
    within:float=30, # [s]
)->float: # how long it took [s]
    "Wait until every process of ours has ended"
    begin = time.monotonic()
    while left := processes(os.getpid()):
        if time.monotonic() > begin + within:
            names = [Path(f"/proc/{p}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-120:] for p in left if state_of(p) != "X"]
            raise Failed(f"{what}: still running after {within:.0f} s: {names}")
        time.sleep(0.1)
    return time.monotonic() - begin


def main(
    check, # () → a note
)->int: # exit code
    "Run a check, say how it went"
    try: note = check()
    except Failed as e:
        print(f"FAIL {e}", file=sys.stderr, flush=True)
        return 1
    print(note, flush=True)
    return 0
