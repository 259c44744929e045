"Put this folder on PYTHONPATH, and Python refuses to leave this machine: what still works needs no network."
import sys

LOCAL = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "", None}

def refuse(event, args):
    "Audit hook: names and addresses of this machine only"
    if event == "socket.getaddrinfo": host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple): host = args[1][0]
    else: return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in LOCAL: raise OSError(f"offline: {host} was asked for")

sys.addaudithook(refuse)
