"""What only a browser can tell, in headless Chromium.

python .ci/browser.py notebooks [--shots DIR] [nbs/14a_widgets.ipynb …]   widgets in JupyterLab (all notebooks that have some)
python .ci/browser.py site [--shots DIR]                                  the built site (_docs/)

Pictures of what was seen go to DIR, to be looked at by a person: nothing here knows what is ugly. Exit code 3: there is
no Chromium on this machine.
"""
import argparse, contextlib, functools, http.server, json, os, re, secrets, shutil, socket, subprocess, sys, tempfile
import threading, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS, SITE = ROOT/"nbs", ROOT/"_docs"
NO_CHROMIUM = 3
HAS_WIDGET = re.compile(r"^(?:from|import) tinyllm\.?(?:widgets|live|playground)?\b.*\b(?:widgets|live|playground)\b|^#\| default_exp (?:widgets|live|playground)", re.M)


class Seen(Exception):
    "Something that is not as it should be"


def find_chromium()->str|None: # path of the program
    "The browser: $CHROMIUM, else the usual names"
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    return next(filter(None, map(shutil.which, filter(None, names))), None)


@contextlib.contextmanager
def browser():
    "A running Chromium"
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"]) # it opens our own pages only
        try: yield b
        finally: b.close()


def until(
    what, # () -> what is waited for; a true value ends it
    why:str, # for the message
    seconds:float=300, # at most; long, for nothing here may hang on the speed of a machine
    every_s:float=.2, # look so often
):
    "Wait for something on a page"
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end: raise Seen(f"after {seconds:.0f} s still not so: {why}")
        time.sleep(every_s)
    return found


# ---------------------------------------------------------------- notebooks in JupyterLab

def with_widgets()->list: # paths
    "Notebooks that have widgets: those that define them, and those that import them"
    def code(path): return "\n".join("".join(c["source"]) for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code")
    return [p for p in sorted(NBS.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts and HAS_WIDGET.search(code(p))]


def settings(folder:Path):
    "JupyterLab without news, and with all cells of a notebook on the page"
    for name, value in {"notebook-extension/tracker": {"windowingMode": "none"}, # else cells out of sight do not exist
                        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}.items():
        file = folder/"@jupyterlab"/f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))


@contextlib.contextmanager
def jupyterlab():
    "JupyterLab over a copy of the project, so that nothing here is changed: its address and token"
    with tempfile.TemporaryDirectory() as top:
        top, token = Path(top), secrets.token_hex(16)
        copy = top/"tinyllm"
        for name in ("nbs", "tinyllm"): shutil.copytree(ROOT/name, copy/name, ignore=shutil.ignore_patterns("__pycache__", "data", "runs"))
        for name in ("settings.ini", "setup.py", "README.md"): shutil.copy(ROOT/name, copy/name)
        settings(top/"settings")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")} | {
            "PYTHONPATH": str(copy), "IPYTHONDIR": str(top/"ipython"), "JUPYTER_CONFIG_DIR": str(top/"config"), "JUPYTER_NO_CONFIG": "1",
            "JUPYTER_DATA_DIR": str(top/"share"), "JUPYTER_RUNTIME_DIR": str(top/"runtime"), "OMP_NUM_THREADS": "1", "MPLBACKEND": ""}
        env.pop("MPLBACKEND") # the notebook's own
        cmd = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}", f"--IdentityProvider.token={token}",
               f"--ServerApp.root_dir={copy/'nbs'}", f"--LabApp.user_settings_dir={top/'settings'}", f"--LabApp.workspaces_dir={top/'workspaces'}",
               "--LabApp.extension_manager=readonly"]
        with open(top/"log", "w+") as log:
            p = subprocess.Popen(cmd, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) # in our group: who ends us ends it
            try:
                def up():
                    if p.poll() is not None: raise Seen(f"JupyterLab ended:\n{(top/'log').read_text()[-2000:]}")
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1): return True
                until(up, "JupyterLab answers")
                yield f"http://127.0.0.1:{port}", token
            finally:
                p.terminate() # ends its kernels first
                try: p.wait(20)
                except subprocess.TimeoutExpired: p.kill()


def kernels(page, lab, method="get", id=""):
    "Ask the server about its kernels, or end one"
    address, token = lab
    found = getattr(page.request, method)(f"{address}/api/kernels/{id}", headers={"Authorization": f"token {token}"})
    if method != "get": return
    told = found.json()
    return told if isinstance(told, list) else [] # a server that is still starting answers with a message


def run_all(
    page, # a browser's
    lab, # from `jupyterlab`
    name:str, # of a notebook
    seconds:float, # at most
):
    "Open a notebook and run every cell; an error in any of them is one here"
    address, token = lab
    page.goto(f"{address}/doc/tree/{name}?token={token}&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=300_000)
    def ready(): return any(k["connections"] and k["execution_state"] == "idle" for k in kernels(page, lab))
    until(ready, "a kernel is connected", every_s=1)
    def begun():
        if select := page.query_selector(".jp-Dialog .jp-mod-accept"): select.click() # it had asked for a kernel
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        with contextlib.suppress(Seen): return until(lambda: any(t != "[ ]:" for t in prompts()), "the cells run", 60)
    def prompts(): return [t.strip() for t in page.eval_on_selector_all(".jp-CodeCell .jp-InputPrompt", "els => els.map(e => e.textContent)")]
    still = []
    def ended():
        found = prompts()
        if found and all(re.fullmatch(r"\[\d+\]:", t) for t in found): return True
        still.append(found)
        if len(still) > 60 and "[*]:" not in found and found == still[-60]: # after an error the rest is left alone
            outputs = [o.inner_text() for o in page.query_selector_all(".jp-Cell-outputArea .jp-RenderedText")]
            raise Seen(f"a cell failed:\n{outputs[-1][-1500:] if outputs else found}")
    until(begun, "the kernel takes the cells", 600) # the page may lag behind the server, and then forgets the click
    until(ended, "all cells have run", seconds, .5)


def view(box)->str:
    "What a widget shows"
    return box.query_selector(".tinyllm-view").inner_html()


FOCUSABLE = ".noUi-handle, select, input[type=text], button"

def controls_of(box, which=FOCUSABLE)->list: # elements
    "What one can operate now, from top to bottom"
    return [e for e in box.query_selector_all(which) if e.is_visible() and e.is_enabled()]


def move(page, control):
    "Move one control with the keyboard alone"
    control.focus()
    kind = control.evaluate("e => e.tagName")
    if kind == "BUTTON": page.keyboard.press("Enter")
    elif kind == "INPUT":
        page.keyboard.press("End")
        page.keyboard.type(" Sam")
        page.keyboard.press("Enter")
    else: page.keyboard.press("ArrowRight")


def move_one(
    page, # a notebook that has run
    box, # a panel on it
)->str: # what was moved
    "Some control of a panel must change what it shows"
    controls = controls_of(box, ".noUi-handle, input[type=text], .widget-toggle-button:not(.mod-active)")
    for i, control in enumerate(controls):
        before = view(box)
        move(page, control)
        with contextlib.suppress(Seen): return until(lambda: view(box) != before and f"control {i} of {len(controls)}", "it changes", 60)
    raise Seen(f"no control changes the view of: {box.inner_text()[:200]}")


def choose(page, box)->int: # how many
    "Of each choice between buttons, another one can be pressed; there is no menu, for JupyterLab keeps its arrow keys"
    if box.query_selector("select"): raise Seen(f"a menu, which cannot be used without a mouse here: {box.inner_text()[:100]}")
    groups = box.query_selector_all(".widget-toggle-buttons")
    for group in groups:
        other = group.query_selector(".widget-toggle-button:not(.mod-active)")
        move(page, other)
        until(lambda: "mod-active" in other.get_attribute("class"), "a choice is taken")
    return len(groups)


def reach(page, box)->int: # how many controls
    "The Tab key alone leads through all controls of a widget"
    controls = controls_of(box)
    for e in controls: e.evaluate("e => e.tinyllmReached = false")
    controls[0].focus()
    for _ in range(2*len(controls) + 10): # a slider's number can be typed, and is a stop of its own
        page.evaluate("document.activeElement.tinyllmReached = true")
        page.keyboard.press("Tab")
    missed = [e.evaluate("e => e.outerHTML.slice(0, 150)") for e in controls if not e.evaluate("e => e.tinyllmReached")]
    if missed: raise Seen(f"{len(missed)} of {len(controls)} controls are not reached by the Tab key: {missed[:3]}")
    return len(controls)


def button(box, name):
    "A button by its text, when it can be pressed"
    def found(): return next((b for b in box.query_selector_all("button") if b.inner_text().strip() == name and b.is_enabled()), None)
    return until(found, f"there is a button {name!r} to press among {[b.inner_text() for b in box.query_selector_all('button')][:20]}")


def click(box, name):
    "Press a button with the keyboard"
    b = button(box, name)
    b.focus()
    b.press("Enter")


def steer(box):
    "Start, pause, step, go on and stop a run"
    def step(): return int(re.search(r"step (\d+)", box.inner_text()).group(1))
    def state(*wanted):
        now = re.search(r"(\w+) · step", box.inner_text()).group(1)
        if now in ("done", "failed") and now not in wanted: raise Seen(f"the run is {now} at step {step()}: it must be long enough to be steered on any machine")
        return now in wanted
    click(box, "Start")
    until(lambda: state("running") and step() > 0, "the run is running", 600)
    click(box, "Pause")
    until(lambda: state("paused"), "the run pauses")
    at = step()
    time.sleep(1.5)
    if step() != at: raise Seen(f"paused at step {at}, it went on to {step()}")
    click(box, "Step")
    until(lambda: state("paused") and step() > at, "one more step")
    one = step()
    click(box, "Go on")
    until(lambda: step() > one, "the run goes on")
    click(box, "Stop")
    until(lambda: state("stopped"), "the run stops", 600)
    return f"started, paused at {at}, stepped to {one}, stopped at {step()}"


def turn(box, label:str, keys:list):
    "Turn the slider with this label by the keyboard"
    row = next(e for e in box.query_selector_all(".widget-inline-hbox") if e.inner_text().strip().startswith(label))
    handle = row.query_selector(".noUi-handle")
    handle.focus()
    for key in keys: handle.press(key)


def play(box):
    "Stream a story, stop one, look at a token of it, take another branch"
    def shown(): return box.query_selector(".tinyllm-view").inner_text()
    def words(): return [b.inner_text() for b in box.query_selector_all(".tinyllm-words button")]
    def told():
        texts.add(shown())
        return bool(words()) and any(b.inner_text().strip() == "Tell" and b.is_enabled() for b in box.query_selector_all("button"))
    texts = set()
    turn(box, "Tokens", ["Home"] + 14*["ArrowRight"])
    turn(box, "Seconds between tokens", ["Home"] + 10*["ArrowRight"]) # a second: slower than any browser looks
    click(box, "Tell")
    until(lambda: not told(), "the story begins", every_s=.02)
    until(told, "the story ends", every_s=.1)
    whole, seen = words()[:-1], len(texts)
    if seen < 5: raise Seen(f"the story was not streamed: {texts}")
    turn(box, "Seconds between tokens", ["End"])
    click(box, "Tell")
    click(box, "Stop") # when there is one to press
    until(told, "the story is cut short")
    if not len(words()[:-1]) < len(whole): raise Seen(f"not cut short: {words()} of {whole}")
    turn(box, "Seconds between tokens", ["Home"])
    click(box, "Tell")
    until(lambda: told() and words()[:-1] == whole, "the same story again")
    def offered(): return [b for b in controls_of(box, ".tinyllm-offer button") if b.inner_text().strip() != "(end)"]
    def offers(): return [b.inner_text() for b in offered()]
    def here(): return next((i for i, b in enumerate(box.query_selector_all(".tinyllm-words button")) if "solid" in b.evaluate("e => getComputedStyle(e).borderStyle")), None)
    before = offers()
    turn(box, "Look at token", 6*["ArrowLeft"])
    until(lambda: here() == len(whole) - 6 and offers() != before, "six tokens back, other words are on offer")
    for at in range(3, len(whole)): # the first place where something else is on offer, too
        box.query_selector_all(".tinyllm-words button")[at].click()
        until(lambda: here() == at, f"a click on token {at} leads there")
        time.sleep(1) # its offers follow
        others = [b for b in offered() if b.inner_text().replace("␣", " ").strip() != whole[at].strip()]
        if others: break
    else: raise Seen(f"nothing else was ever on offer in {whole}")
    others[-1].click()
    def begins(): return "".join(words()).startswith("".join(whole[:at])) # as text: its end may be cut into other tokens
    until(lambda: told() and begins() and words()[:-1] != whole, "another branch is told")
    return f"{seen} states of the text while it was told, then another branch: {''.join(words())[:60]!r}"


def notebooks(
    paths, # notebooks
    shots, # folder for pictures, or None
    seconds:float=900, # at most for all cells of one notebook
):
    "Open each notebook, run it, and use its widgets in both themes"
    with browser() as b, jupyterlab() as lab:
        for path in paths:
            name, began = path.stem, time.monotonic()
            page = b.new_page(viewport=dict(width=1200, height=900))
            page.set_default_timeout(180_000)
            try:
                run_all(page, lab, path.relative_to(NBS).as_posix(), seconds)
                boxes = {kind: page.query_selector_all(f".tinyllm-{kind}") for kind in ("widget", "dashboard", "playground")}
                if not any(boxes.values()): raise Seen("no widget on the page")
                for box in boxes["widget"]: move_one(page, box)
                choices, stops = (sum(f(page, box) for box in found) for f, found in ((choose, boxes["widget"]), (reach, sum(boxes.values(), []))))
                notes = [f"{stops} controls reached by Tab"] + ([f"{len(boxes['widget'])} panels moved, {choices} choices made"] if boxes["widget"] else [])
                notes += [steer(box) for box in boxes["dashboard"][-1:]] + [play(box) for box in boxes["playground"]]
                for theme in ("light", "dark"):
                    if theme == "dark": dark(page)
                    for kind, found in boxes.items():
                        for i, box in enumerate(found): picture(box, shots, f"{name}-{kind}{i}-{theme}")
                print(f"{path.name}: {'; '.join(notes)} ({time.monotonic() - began:.0f} s)", flush=True)
            except Exception as e:
                picture(page, shots, f"{name}-failed")
                raise Seen(f"{path.name}: {e}") from e
            finally:
                for k in kernels(page, lab): kernels(page, lab, "delete", k["id"])
                page.close()


def dark(page):
    "Switch JupyterLab to its dark theme"
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")
    time.sleep(1)


def picture(what, shots, name:str):
    "Keep a picture for a person to look at"
    if not shots: return
    Path(shots).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Exception):
        if hasattr(what, "scroll_into_view_if_needed"): what.scroll_into_view_if_needed()
        what.screenshot(path=str(Path(shots)/f"{name}.png"))


# ---------------------------------------------------------------- the site

@contextlib.contextmanager
def served(folder:Path):
    "A folder over HTTP: its address"
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try: yield f"http://127.0.0.1:{server.server_port}/"
    finally: server.shutdown()


def watched(context, faults:list, home:str):
    "A page whose console errors, failed requests and requests to elsewhere are faults"
    page = context.new_page()
    def fault(what): faults.append(f"{page.url.removeprefix(home) or 'index.html'}: {what}")
    page.on("console", lambda m: m.type == "error" and fault(f"console: {m.text}"))
    page.on("pageerror", lambda e: fault(f"error: {e}"))
    page.on("response", lambda r: r.status >= 400 and fault(f"{r.status} for {r.url}"))
    def only_ours(route):
        if route.request.url.startswith((home, "data:")): return route.continue_()
        fault(f"needs the network for {route.request.url}")
        route.abort()
    page.route("**/*", only_ours)
    return page


IMAGES = """() => [...document.images].filter(i => { i.loading = 'eager'; return i.complete && !i.naturalWidth })
                  .map(i => (i.getAttribute('src') || '').slice(0, 80))"""
LINKS = "els => els.map(e => e.href.split('#')[0])"
WIDER = """() => { const w = document.documentElement.clientWidth; return document.documentElement.scrollWidth > w + 1 ?
           [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > w + 1 &&
             ![...(function*() { for (let p = e.parentElement; p; p = p.parentElement) yield p })()].some(p => /auto|scroll|hidden/.test(getComputedStyle(p).overflowX)))
             .slice(0, 3).map(e => e.outerHTML.slice(0, 120)) : [] }"""
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"


def site(shots):
    "Open every page; search; look at the home page on a telephone, light and dark"
    if not (SITE/"index.html").exists(): raise Seen("there is no site: python .ci/docs.py")
    faults, to_see, seen = [], [], set()
    with browser() as b, served(SITE) as home:
        context = b.new_context(viewport=dict(width=1300, height=900))
        context.set_default_timeout(180_000)
        page = watched(context, faults, home)
        to_see.append(home + "index.html")
        while to_see:
            url = to_see.pop(0)
            if url in seen: continue
            seen.add(url)
            page.goto(url, wait_until="load")
            faults += [f"{url.removeprefix(home)}: broken image {src}" for src in page.evaluate(IMAGES)]
            links = page.eval_on_selector_all("a[href]", LINKS)
            for link in dict.fromkeys(l for l in links if l.startswith(home)):
                if link.endswith((".html", "/")): to_see.append(link)
                elif link not in seen and page.request.get(link).status >= 400: faults.append(f"{url.removeprefix(home)}: broken link {link}")
        page.goto(home + "index.html")
        picture(page, shots, "site-home-light")
        field = page.locator(".smalldocs-search input").first
        field.fill("RMSNorm")
        page.wait_for_selector(".smalldocs-search-results .search-result")
        hits = page.eval_on_selector_all(".search-result", "els => els.map(e => e.getAttribute('href'))")
        picture(page, shots, "site-search")
        if not any("layers.html" in h for h in hits): faults.append(f"search for RMSNorm finds {hits}, not the layers")
        context.close()
        for scheme in ("light", "dark"):
            for width, height, where in ((1300, 900, "wide"), (390, 844, "phone")):
                context = b.new_context(viewport=dict(width=width, height=height), color_scheme=scheme)
                context.set_default_timeout(180_000)
                page = watched(context, faults, home)
                for name in ("index.html", "widgets.html", "glossary.html"):
                    if not (SITE/name).exists(): continue
                    page.goto(home + name)
                    if (sum(page.evaluate(BACKGROUND)) < 3*128) != (scheme == "dark"): faults.append(f"{name}: {page.evaluate(BACKGROUND)} in the {scheme} theme")
                    if where == "phone":
                        if wide := page.evaluate(WIDER): faults.append(f"{name}: wider than {width} px: {wide}")
                        if not page.locator(".navbar-toggler").first.is_visible(): faults.append(f"{name}: no menu button at {width} px")
                    picture(page, shots, f"site-{Path(name).stem}-{where}-{scheme}")
                    page.mouse.wheel(0, 1400)
                    time.sleep(.3)
                    picture(page, shots, f"site-{Path(name).stem}-{where}-{scheme}-below")
                if where == "phone":
                    page.goto(home + "index.html")
                    page.locator(".navbar-toggler").first.click()
                    page.wait_for_selector("#navbarCollapse.show")
                context.close()
    if faults: raise Seen("\n".join(dict.fromkeys(faults)))
    print(f"{len(seen)} pages without an error, search finds RMSNorm in {len(hits)} places")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("notebooks", "site"))
    p.add_argument("paths", nargs="*", help="notebooks; all that have widgets without")
    p.add_argument("--shots", help="folder for pictures")
    args = p.parse_args()
    if find_chromium() is None:
        print("no Chromium here: install one (Debian: apt-get install chromium), or name it in $CHROMIUM", file=sys.stderr)
        return NO_CHROMIUM
    try:
        if args.what == "notebooks": notebooks([Path(n).resolve() for n in args.paths] or with_widgets(), args.shots)
        else: site(args.shots)
    except Seen as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__": sys.exit(main())
