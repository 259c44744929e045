"""Two machines in one: two network namespaces joined by a virtual cable, torchrun with a c10d rendezvous on each.

python .ci/two_nodes.py               the scenes that .ci/run plays
python .ci/two_nodes.py --scenes all  all of them
Needs root and the ip command (iproute2); elsewhere it says so and is skipped.
"""
import argparse, os, re, shutil, subprocess, sys, time
from pathlib import Path
from checks import Failed, SMALL, outcome, tail
from group import NAME, ended, kill, last_row, main, must_equal_undisturbed, none_left, steps_saved, torchrun, until, workers, workplace

STEPS = 45 # of the runs that finish
TIMEOUT = 20 # a peer that is silent for so long is gone [s]
JOIN = 25 # a rendezvous that is not complete after so long has failed [s]
SETTINGS = [*SMALL[1:], f"--train.steps={STEPS}", "--train.micro_batch_size=1", f"--distributed.timeout_s={TIMEOUT}"]
SHORT = ["worker", "node"]


def why_not()->str|None: # None when all is there
    "What this machine lacks"
    if sys.platform != "linux": return "network namespaces are a thing of Linux"
    if os.geteuid(): return "only root may make network namespaces"
    if not shutil.which("ip"): return "the ip command is not installed (iproute2)"
    space = f"{NAME}-{os.getpid()}-probe"
    try:
        ip("netns", "add", space)
        ip("-n", space, "link", "add", "one", "type", "veth", "peer", "name", "other")
    except Failed as e: return f"no network namespace with a virtual cable can be made here ({e})"
    finally: subprocess.run(["ip", "netns", "del", space], capture_output=True)


class Node:
    "One of the two machines"
    def __init__(self, letter):
        self.letter, self.address = letter, f"10.77.0.{1 + (letter == 'b')}"
        self.space, self.cable = f"{NAME}-{os.getpid()}-{letter}", f"cable-{letter}"
        self.agent = self.log = None

    def ip(self, *words): ip("-n", self.space, *words)

    def launch(self, settings, cwd:Path, max_restarts:int, rdzv_id:str, nnodes="2", join=JOIN, **env):
        "torchrun as one would type it on this machine; the rendezvous is at home on a"
        self.log = cwd/f"{rdzv_id}-{self.letter}.log"
        conf = f"is_host={int(self.letter == 'a')},join_timeout={join},read_timeout={TIMEOUT}"
        options = ["--nnodes", nnodes, "--nproc_per_node", "1", "--max_restarts", str(max_restarts),
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.77.0.1:29400", "--rdzv_id", rdzv_id,
                   "--rdzv_conf", conf, "--local_addr", self.address]
        self.agent = torchrun(options, [*settings, f"--distributed.interface={self.cable}"], cwd, self.log,
                              prefix=["ip", "netns", "exec", self.space], **env)

    def worker(self)->int:
        "Pid of its worker, 0 when there is none"
        return next(iter(workers(self.agent.pid).values()), 0)

    def lose_power(self):
        "Gone without a word: the cable first, so that no farewell of the dying sockets gets through"
        self.ip("link", "set", self.cable, "down")
        self.kill_all()

    def kill_all(self):
        "Every process of this machine, at once"
        pids = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True).stdout.split()
        kill(*map(int, pids))
        self.agent.wait()


def ip(*words):
    "One ip command"
    p = subprocess.run(["ip", *words], capture_output=True, text=True)
    if p.returncode: raise Failed(f"ip {' '.join(words)}: {p.stderr.strip()}")


def connect(*nodes):
    "Two namespaces and the cable between them"
    for n in nodes: ip("netns", "add", n.space)
    a, b = nodes
    ip("link", "add", a.cable, "netns", a.space, "type", "veth", "peer", "name", b.cable, "netns", b.space)
    for n in nodes:
        n.ip("addr", "add", f"{n.address}/24", "dev", n.cable)
        plug_in(n)


def plug_in(node):
    "Its network is up"
    for link in ("lo", node.cable): node.ip("link", "set", link, "up")


# ---------------------------------------------------------------- scenes

def start(nodes, top, name, steps=STEPS, **kw):
    "A run on all nodes; they share the folder, as nodes share a file system"
    for n in nodes: n.launch([*SETTINGS, f"--train.steps={steps}", f"--run.name={name}"], top, rdzv_id=name, **kw)
    return top/"runs"/name


def trains(node, run, step=6, since=0):
    "Wait until the run is past a step and has saved"
    until("training", lambda: _alive(node) and last_row(run, since).get("step", 0) >= step and steps_saved(run), node.log)


def _alive(node):
    if node.agent.poll() is not None: raise Failed(f"torchrun on {node.letter} ended early with {node.agent.returncode}\n{tail(node.log.read_text())}")
    return True


def must_end_well(nodes, what):
    "All torchruns return 0 and leave nothing running"
    for n in nodes:
        if code := ended(n.agent, f"{what}, torchrun on {n.letter}", n.log):
            raise Failed(f"{what}: torchrun on {n.letter} returned {code}\n{tail(n.log.read_text())}")
    none_left(what)


def undisturbed(nodes, top):
    "Nothing happens: what the other scenes must equal"
    run = start(nodes, top, "undisturbed", max_restarts=0)
    must_end_well(nodes, "undisturbed")
    return outcome(run)


def worker(nodes, top, want):
    "One worker is killed: both machines restart, resume by themselves, and end as if nothing had been"
    run = start(nodes, top, "worker", max_restarts=1)
    trains(nodes[0], run)
    before = [n.worker() for n in nodes]
    at = last_row(run).get("step")
    kill(before[1])
    until("new workers", lambda: all(n.worker() not in (0, p) for n, p in zip(nodes, before)), nodes[0].log)
    must_end_well(nodes, "a worker killed")
    return f"worker on b killed after step {at}: " + _resumed(run, want)


def _resumed(run, want):
    must_equal_undisturbed(run, want)
    rows = [r for r in (run/"metrics.jsonl").read_text().splitlines() if '"event": "resume"' in r or '"event":"resume"' in r]
    if not rows: raise Failed(f"{run.name}: nothing was resumed, so nothing was tested")
    return f"resumed {len(rows)} time(s), weights and log as undisturbed"


def node(nodes, top, want, gone=1):
    "A machine goes silent and stays away: the other gives up after the allowed restart, with an error and without a hang"
    run = start(nodes, top, f"node-{nodes[gone].letter}", steps=100_000, max_restarts=1)
    stays = nodes[1 - gone]
    trains(stays, run)
    begin = time.monotonic()
    nodes[gone].lose_power()
    within = TIMEOUT + JOIN + 120 # the peer is missed, the restart waits for it, both shut down
    code = ended(stays.agent, f"{nodes[gone].letter} without power, torchrun on {stays.letter}", stays.log, within)
    seconds = time.monotonic() - begin
    if not code: raise Failed(f"torchrun on {stays.letter} returned 0 although {nodes[gone].letter} is gone\n{tail(stays.log.read_text())}")
    none_left(f"{nodes[gone].letter} without power")
    plug_in(nodes[gone])
    said = re.findall("tinyllm: .*", stays.log.read_text(errors="replace")) # two processes write into one line now and then
    if not said: raise Failed(f"the worker on {stays.letter} died without a word of ours\n{tail(stays.log.read_text())}")
    return f"{nodes[gone].letter} without power: {stays.letter} ended with {code} after {seconds:.0f} s, saying: {said[0][:200]}"


def host(nodes, top, want):
    """The same when the machine that is home to the rendezvous goes away. torchrun's own wait for it has no limit but
    the kernel's (15 resends, a quarter of an hour), so the kernel is told to give up sooner"""
    file = "/proc/sys/net/ipv4/tcp_retries2"
    subprocess.run(["ip", "netns", "exec", nodes[1].space, "sh", "-c", f"echo 6 > {file}"], check=True)
    return node(nodes, top, want, gone=0)


def replaced(nodes, top, want):
    """A machine crashes and comes back: a new torchrun joins the rendezvous, and the run goes on. By default the agent of
    rank 0 tells its store's address in the first round only (torch 2.13), so that a newcomer waits for it in vain"""
    how = dict(max_restarts=3, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    run = start(nodes, top, "replaced", **how)
    trains(nodes[0], run)
    nodes[1].kill_all()
    nodes[1].launch([*SETTINGS, "--run.name=replaced"], top, rdzv_id="replaced", **how)
    must_end_well(nodes, "a machine replaced")
    return "b crashed and was started again: " + _resumed(run, want)


def alone(nodes, top, want):
    "With --nnodes 1:2 the machine that is left goes on alone, once the other has missed three heartbeats and the last call"
    run = start(nodes, top, "alone", max_restarts=3, nnodes="1:2", join=120)
    trains(nodes[0], run)
    nodes[1].lose_power()
    must_end_well(nodes[:1], "going on alone")
    plug_in(nodes[1])
    rows = [l for l in (run/"metrics.jsonl").read_text().splitlines() if '"eval"' in l]
    return f"b without power, --nnodes 1:2: a went on alone to the end ({len(rows)} evaluations)"


SCENES = {f.__name__: f for f in (worker, node, host, replaced, alone)}

def check(
    names, # of scenes
)->str: # note
    "Play the scenes"
    if reason := why_not(): return f"skipped: {reason}"
    with workplace() as top:
        nodes, begin = (Node("a"), Node("b")), time.monotonic()
        connect(*nodes)
        want = undisturbed(nodes, top)
        print(f"two nodes, undisturbed: {time.monotonic() - begin:.0f} s", flush=True)
        for name in names: print(SCENES[name](nodes, top, want), flush=True)
    return f"{len(names)} scenes, {time.monotonic() - begin:.0f} s"


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scenes", default=",".join(SHORT), help=f"all, or some of {','.join(SCENES)}")
    names = p.parse_args().scenes
    names = list(SCENES) if names == "all" else names.split(",")
    if unknown := set(names) - set(SCENES): p.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    sys.exit(main(lambda: check(names)))
