"""Import one module in a fresh process and say what else that did: python .ci/import_probe.py tinyllm.data

An import may define things. It may not start threads, open files for writing, use the network or touch a GPU."""
import importlib, os, sys, threading
import matplotlib.font_manager # writes its own font cache the first time: not our doing

module, done = sys.argv[1], []

def watch(event, args):
    "Audit hook: note what an import should not do"
    if event == "open":
        path, mode, flags = args
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
        if isinstance(path, int): return # a descriptor that is open already
        if writes and "__pycache__" not in str(path) and str(path) != os.devnull: done.append(f"writes {path}")
    elif event == "os.mkdir":
        if "__pycache__" not in str(args[0]): done.append(f"makes {args[0]}") # Python's own, in a fresh clone
    elif event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen"): done.append(event)

before = set(threading.enumerate())
sys.addaudithook(watch)
importlib.import_module(module)
done += [f"starts thread {t.name}" for t in set(threading.enumerate()) - before]
torch = sys.modules.get("torch")
if torch is not None and torch.cuda.is_initialized(): done.append("initialises CUDA")
if done: sys.exit(f"importing {module}: {'; '.join(done)}")
