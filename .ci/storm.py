"""Two training processes under fire: orphaned at birth, killed at random instants, with damaged checkpoints, on a full disk.

python .ci/storm.py --kills 30             the whole storm
python .ci/storm.py --kills 4 --seed 1     a short one
Whatever happens, the final weights and the log must be those of an undisturbed run.
The full disk is a small tmpfs, which only root can mount; elsewhere that part says so and is skipped.
"""
import argparse, collections, contextlib, itertools, os, random, re, subprocess, sys, time
from pathlib import Path
from checks import Failed, SMALL, outcome, tail
from group import ended, kill, last_row, main, must_equal_undisturbed, none_left, steps_saved, torchrun, until, workers, workplace

AIMS = [("worker", "stepping"), ("worker", "starting"), ("worker", "saving"), ("group", "evaluating"), # who is hit, doing what
        ("worker", "evaluating"), ("group", "starting"), ("group", "saving"), ("group", "stepping")]
DAMAGED = ["model.safetensors", "trainer/rank-1.safetensors", "manifest.json"]
EVAL_EVERY, TIMEOUT = 10, 30 # [steps], [s]
GRACE = 15 # workers may outlive torchrun for so long, on a busy machine; far less than they would wait for each other [s]
SETTINGS = [*SMALL[1:], "--train.micro_batch_size=1", f"--train.eval_every={EVAL_EVERY}", f"--distributed.timeout_s={TIMEOUT}"]


class Run:
    "One run directory and the torchrun that works on it"
    def __init__(self, top:Path, name:str, steps:int, restarts:int, extra=()):
        self.top, self.log, self.dir = top, top/f"{name}.log", top/"runs"/name
        self.settings = [*SETTINGS, f"--train.steps={steps}", f"--run.name={name}", *extra]
        self.restarts, self.outlived = restarts, 0 # [s] longest that workers lived on without torchrun
        self.log.touch()
        self.start()

    def start(self, *more):
        "A new torchrun, which knows nothing of an earlier one"
        self.begun, self.mark = time.time(), self.log.stat().st_size
        self.agent = torchrun(["--standalone", "--nproc_per_node", "2", "--max_restarts", str(self.restarts)],
                              [*self.settings, *more], self.top, self.log)

    def workers(self)->dict: return workers(self.agent.pid)
    def over(self)->bool: return self.agent.poll() is not None
    def said(self)->str: return self.log.read_bytes()[self.mark:].decode(errors="replace") # the mark counts bytes, and stories hold more than ASCII

    def phase(self)->str:
        "What the group is doing, by what it has written"
        with contextlib.suppress(OSError):
            if any(e.name.startswith(".tmp-") and e.is_dir() for e in os.scandir(self.dir/"checkpoints")): return "saving"
        row = last_row(self.dir, self.begun)
        if not row: return "starting"
        done = row["event"] == "train" and row["step"] % EVAL_EVERY == 0
        return "evaluating" if done or row["event"] == "eval" else "stepping"

    def finish(self, what:str):
        "To the end, which must be a good one"
        code = ended(self.agent, what, self.log, 600)
        if code: raise Failed(f"{what}: torchrun returned {code}\n{tail(self.log.read_text())}")
        none_left(what)


# ---------------------------------------------------------------- kills

def damage(
    file:Path, # of a checkpoint
    how:str, # cut, flip or tear
    rng:random.Random, # where
):
    "What a bad disk or a crash without a flush leaves of a file"
    data = bytearray(file.read_bytes())
    if how == "cut": data = data[:rng.randrange(len(data))]
    if how == "flip": data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if how == "tear": # the later blocks never reached the disk
        at = rng.randrange(len(data) - 1)
        data[at:] = bytes(len(data) - at)
    file.write_bytes(data)


def one_worker(run:Run, rng)->str:
    "SIGKILL one rank; torchrun must restart both"
    before = run.workers()
    rank = rng.choice(sorted(before))
    kill(before[rank])
    until("new workers", lambda: run.over() or len(new := run.workers()) == 2 and not set(new.values()) & set(before.values()),
          run.log)
    run.begun = time.time()
    if run.over() and run.agent.returncode: raise Failed(f"torchrun gave up with {run.agent.returncode}\n{tail(run.said())}")
    return f"rank {rank}"


def whole_group(run:Run, rng, faults)->str:
    "SIGKILL torchrun, or all of it; perhaps damage the newest checkpoint; start again"
    orphans = rng.random() < 0.5
    kill(run.agent.pid, *([] if orphans else run.workers().values()))
    run.agent.wait()
    run.outlived = max(run.outlived, none_left("torchrun killed, its workers", GRACE))
    saved, fault = steps_saved(run.dir), None
    if len(saved) > 1 and faults:
        fault = faults.pop()
        damage(run.dir/"checkpoints"/f"step-{saved[-1]}"/fault[0], fault[1], rng)
    run.start("--resume")
    if fault: must_fall_back(run, saved, fault)
    return ("torchrun" if orphans else "all") + (f", then {fault[1]} {fault[0]} of step {saved[-1]}" if fault else "")


def must_fall_back(run:Run, saved:list, fault):
    "The damaged checkpoint is named in a warning, and an earlier one is used"
    def resumed(): return run.over() or re.search(r"step (\d+): resume", run.said()) # two processes write into one line now and then
    found = until(f"resuming with a damaged {fault[0]}", resumed, run.log)
    step = int(found.group(1)) if found is not True else None
    said = [l for l in run.said().splitlines() if f"step-{saved[-1]}" in l and "instead" in l]
    if step is None or step >= saved[-1]: raise Failed(f"{fault}: went on from step {step}, not from before {saved[-1]}\n{tail(run.said())}")
    if not said: raise Failed(f"{fault}: no warning names step-{saved[-1]}\n{tail(run.said())}")


def hit(run:Run, target, phase:str, rng, faults)->tuple: # what was hit, in which phase; None when the run was over before
    "Wait for a phase, then for a random instant in it, and kill"
    until("two workers", lambda: run.over() or len(run.workers()) == 2, run.log)
    if phase == "starting": time.sleep(rng.uniform(0, 4))
    else: until(phase, lambda: run.over() or run.phase() == phase, run.log, pause=0.0005)
    if phase != "starting": time.sleep(rng.uniform(0, dict(stepping=0.1, saving=0.015, evaluating=0.2)[phase]))
    if run.over() or len(run.workers()) < 2: return None
    found = run.phase()
    return (one_worker(run, rng) if target == "worker" else whole_group(run, rng, faults)), found


def storm(top:Path, kills:int, rng, want, steps:int)->str:
    "Kill until enough were killed; each run that ends must be the undisturbed one"
    faults = list(itertools.product(DAMAGED, ["cut", "flip", "tear"]))
    rng.shuffle(faults)
    n_faults, tally, runs, done, outlived = len(faults), collections.Counter(), 0, 0, 0
    aims = itertools.cycle(AIMS)
    while done < kills:
        runs += 1
        run = Run(top, f"storm-{runs}", steps, kills)
        while done < kills and not run.over():
            what = hit(run, *next(aims), rng, faults)
            if what is None: break
            done += 1
            tally[what[1]] += 1
            print(f"     kill {done}: {what[0]}, while {what[1]}, log at step {last_row(run.dir).get('step')}", flush=True)
        run.finish(f"the storm, run {runs}")
        must_equal_undisturbed(run.dir, want)
        outlived = max(outlived, run.outlived)
    seen = ", ".join(f"{n} {p}" for p, n in tally.items())
    return (f"{done} kills ({seen}) and {n_faults - len(faults)} damaged checkpoints in {runs} run(s) of {steps} steps: "
            f"weights and log as undisturbed; workers lived on for {outlived:.1f} s at most when torchrun was killed")


def early_orphans(top:Path, steps:int)->str:
    "SIGKILL torchrun when its workers have just been born and import PyTorch: they must not live on"
    lived = {}
    for after in (0, 0.1, 0.3, 1, 3): # [s]
        run = Run(top, f"orphans-{after}", steps, 0)
        until("two workers", lambda: run.over() or len(run.workers()) == 2, run.log, pause=0.001)
        time.sleep(after)
        kill(run.agent.pid)
        run.agent.wait()
        lived[after] = none_left(f"torchrun killed {after} s after its workers appeared, they", GRACE)
    return "torchrun killed early: " + ", ".join(f"after {a} s its workers lived on for {s:.1f} s" for a, s in lived.items())


# ---------------------------------------------------------------- a full disk

def full_disk(top:Path, want, steps:int)->str:
    "Space for two checkpoints and a half: the run lives on or ends with an error, what it saved is whole, and with room it ends well"
    if os.geteuid(): return "full disk skipped: only root may mount a tmpfs"
    one = sum(f.stat().st_size for f in (top/"runs"/"undisturbed"/"checkpoints"/"latest").resolve().rglob("*") if f.is_file())
    disk = top/"small"
    disk.mkdir()
    size = int(2.5*one) + 200_000
    p = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True, text=True)
    if p.returncode: return f"full disk skipped: no tmpfs can be mounted here ({p.stderr.strip()})"
    run = Run(top, "full", steps, 0, [f"--run.dir={disk}"])
    run.dir = disk/"full"
    code = ended(run.agent, "full disk", run.log, 600)
    none_left("full disk")
    said = [l for l in run.said().splitlines() if "space" in l.lower()]
    if not said: raise Failed(f"full disk: exit code {code}, and nobody speaks of space\n{tail(run.said())}")
    if code not in (0, 1): raise Failed(f"full disk: exit code {code}\n{tail(run.said())}")
    if "Traceback" in run.said().split("failed (exitcode")[0]: # torchrun's own comes later
        raise Failed(f"full disk: a traceback\n{tail(run.said(), 60)}")
    left = must_be_whole(run.dir)
    subprocess.run(["mount", "-o", f"remount,size={20*one}", disk], check=True)
    run.start("--resume")
    run.finish("after the disk was full")
    if outcome(run.dir)[0] != want[0]: raise Failed("after the disk was full: other final weights")
    return (f"disk of {size/1e6:.1f} MB: exit code {code}, checkpoints of steps {left} whole, said {len(said)} time(s): "
            f"{said[0].strip()[:160]}; with room again the same final weights")


def must_be_whole(run:Path)->list: # steps
    "Every checkpoint that is there can be used"
    code = ("import sys\nfrom pathlib import Path\nfrom tinyllm.checkpoint import checkpoints, verify\n"
            "for p in checkpoints(Path(sys.argv[1])).values(): verify(p)")
    p = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True)
    if p.returncode: raise Failed(f"{run}: {tail(p.stderr, 3)}")
    if not (steps := steps_saved(run)): raise Failed(f"{run}: no checkpoint is left")
    return steps


def check(
    kills:int, # how many
    seed:int, # of all that is random
)->str: # note
    "All of it"
    rng, begin, steps = random.Random(seed), time.monotonic(), 30 + 2*kills
    print(f"seed {seed}", flush=True)
    with workplace() as top:
        run = Run(top, "undisturbed", steps, 0)
        run.finish("undisturbed")
        want = outcome(run.dir)
        print(f"undisturbed: {steps} steps, {time.monotonic() - begin:.0f} s", flush=True)
        print(early_orphans(top, steps), flush=True)
        print(storm(top, kills, rng, want, steps), flush=True)
        print(full_disk(top, want, steps), flush=True)
    return f"{time.monotonic() - begin:.0f} s"


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=4)
    p.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = p.parse_args()
    sys.exit(main(lambda: check(args.kills, args.seed)))
