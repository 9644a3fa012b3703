"""A process that has imported the frameworks and forks the ranks of launches.

    python -I -S fork_server.py SOCKET script [words]

is what a launcher starts in place of `python script [words]`. It hands its arguments, environment,
folder and standard streams to the server behind the Unix socket, which forks the rank, and ends as
the rank ends: with its status, or by its signal. If it is killed, its rank is killed, too.

The server imports and does nothing else: it never starts Horovod, MPI or TensorFlow's runtime,
whose threads and connections would not survive a fork. `ForkServer` starts it; it ends with the
process that started it.
"""

# What the launcher starts imports this file, so only small modules stand here.
import array
import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TIME = 10  # seconds that a request may take to arrive


# --- what the launcher starts -----------------------------------------------------------


def stand_in(path, words):
    """Have the server behind `path` run a script as a rank; end as the rank ends."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {"folder": os.getcwd(), "environment": dict(os.environ), "words": words}
    streams = array.array("i", [0, 1, 2])
    text = json.dumps(request).encode() + b"\n"
    sent = server.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(text[sent:])
    answers = server.makefile()
    pid = int(answers.readline())
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(answers.readline() or 1)  # nothing if the server has ended
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server -------------------------------------------------------------------------


class _Server:
    """Forks a rank for each connection and reports its end to whoever asked for it."""

    def __init__(self, path):
        import selectors

        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self._fork)
        self.selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        self.ranks = {}  # pid -> connection, file descriptor of the process

    def serve(self):
        """Return the request of a forked rank, in that rank only; the server never returns."""
        while True:
            for key, _ in self.selector.select():
                request = key.data()
                if request is not None:
                    return request

    def _fork(self):
        connection, _ = self.listener.accept()
        connection.settimeout(_TIME)
        try:
            request, streams = _receive(connection)
        except (OSError, ValueError) as error:
            print(f"a request that no rank was forked for: {error!r}", file=sys.stderr)
            return connection.close()
        pid = os.fork()
        if pid == 0:
            self._forget()
            connection.close()
            return request, streams
        for stream in streams:
            os.close(stream)
        watched = os.pidfd_open(pid)
        self.ranks[pid] = connection, watched
        self.selector.register(watched, 1, lambda: self._ended(pid))
        self.selector.register(connection, 1, lambda: self._kill(pid))
        try:
            connection.sendall(b"%d\n" % pid)
        except OSError:
            pass  # then the connection ends, too

    def _ended(self, pid):
        connection, watched = self.ranks.pop(pid)
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(watched)
        os.close(watched)
        try:
            self.selector.unregister(connection)
        except KeyError:
            pass  # whoever asked was killed
        else:
            try:
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            except OSError:
                pass  # killed just now
        connection.close()

    def _kill(self, pid):
        """Kill a rank whose stand-in has ended, as a launcher's SIGKILL would have."""
        self.selector.unregister(self.ranks[pid][0])
        os.kill(pid, signal.SIGKILL)

    def _end(self):
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _forget(self):
        """Close what belongs to the server, in a rank."""
        for connection, watched in self.ranks.values():
            connection.close()
            os.close(watched)
        self.selector.close()
        self.listener.close()


def _receive(connection):
    """Return a request and its three file descriptors."""
    text, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_LEN(3 * 4))
    streams = array.array("i")
    for _, _, content in ancillary:
        streams.frombytes(content)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            raise ValueError("it ends too early")
        text += more
    return json.loads(text), list(streams)


# --- a forked rank ----------------------------------------------------------------------


def _become(request, streams):
    """Take over what the stand-in handed over."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()  # a signal to the rank's group must not reach the server
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show(request["words"], request["environment"])
    sys.argv[:] = request["words"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in given if folder and folder not in sys.path]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator starts anew after a fork
    if any(name.startswith("COVERAGE_PROCESS_") for name in os.environ):
        import coverage

        coverage.process_startup(force=True)


def _show(words, environment):
    """Have /proc show this process' command and environment, by which tests find processes."""
    import ctypes

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begun = [int(field) for field in fields[45:49]]  # see proc(5): arg_start to env_end
    rows = words, [f"{name}={value}" for name, value in environment.items()]
    for begin, end, row in zip(begun[::2], begun[1::2], rows, strict=True):
        content = "\0".join(row).encode(errors="surrogateescape")[: end - begin - 1]
        ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


def _run():
    """Run the script as the module `__main__`; end the process as Python does, but at once.

    Python would also free all objects, which copies the server's memory page by page.
    """
    import atexit
    import threading
    import types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    status = 0
    try:
        with open(sys.argv[0], "rb") as file:
            code = compile(file.read(), sys.argv[0], "exec")
        exec(code, main.__dict__)
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as Python does
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")  # its exit handler is one of C
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _serve(path, modules):
    import gc
    import importlib

    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank need not copy the server's objects
    server = _Server(path)
    print("ready", flush=True)
    return server.serve()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _become(*_serve(sys.argv[2], sys.argv[3:]))
        _run()
    else:
        stand_in(sys.argv[1], sys.argv[2:])
