"""A Python that has imported torch and fastload, has started no thread, and forks itself for each program.

    python warm_python.py SOCKET MODULE...

`tests.children` sends orders over the socket. An order is "+", modules to import before the fork, and descriptors: the
order as JSON, a pipe for the report, the program's standard input, output and error, and what else it inherits. The
report is the fork's process id, then its wait status and the moment of its end. A fork returns from `next_program` into
the last lines of this file, which run the program in the namespace of `__main__`. So it begins and ends as `python -c`,
`python -m` or `python FILE` does. If the socket closes, the server kills its programs and ends.
"""

import array
import atexit
import faulthandler
import fcntl
import gc
import importlib.util
import io
import json
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress

import numpy


class End:
    """Ends a fork as soon as its exit handlers have run. Taking down torch's modules takes half a second more.

    A script whose end is tested takes down its modules, as every Python does, and prints the moment before.
    """

    status = None
    is_script = False

    def __call__(self, sys=sys, monotonic=time.monotonic, leave=os._exit):
        if self.is_script:
            print("END", monotonic(), flush=True)
        elif self.status is not None:
            for stream in (sys.stdout, sys.stderr):
                if stream and not stream.closed:
                    stream.flush()
            leave(self.status)

    def run(self, code, names):
        """Run the program, and note the exit status of one that ends as it wants to."""
        try:
            exec(code, names)
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                self.status = error.code or 0
            raise
        self.status = 0


MOST_DESCRIPTORS = 32
OWN = {name for name in globals() if name.startswith("__")}
end = atexit.register(End())  # first registered, last called


def end_group(pid):
    """Kill a program's group, if it has one of its own, with all that it forked and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def reap(pid, report):
    """Report the end of a program."""
    _, status = os.waitpid(pid, 0)
    end_group(pid)
    with suppress(BrokenPipeError):  # the test may not wait for it
        os.write(report, f"{status} {time.monotonic()}\n".encode())
    os.close(report)


def load(modules):
    """Import modules, and let no fork collect, and so copy, what they have made."""
    if not modules or sys.modules.keys() >= set(modules):
        return
    for module in modules:
        with suppress(Exception):  # the program meets the error itself, and no later one does
            __import__(module)
    assert len(os.listdir("/proc/self/task")) == 1, f"a fork would lose the threads of {modules}"
    gc.collect()
    gc.freeze()


def receive(orders):
    """Return the descriptors of the next order, or None if the tests have ended. Import what the order needs."""
    size = array.array("i").itemsize
    message, ancillary, _, _ = orders.recvmsg(4096, socket.CMSG_SPACE(MOST_DESCRIPTORS * size))
    if not message:
        return None
    load(message.decode().split()[1:])
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    return list(descriptors)


def next_program(orders):
    """Fork for each order. Return in the fork only: the order, and the program's streams and inherited descriptors."""
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    running = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not orders:
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                reap(*running.pop(key.fileobj))
                continue
            descriptors = receive(orders)
            if descriptors is None:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                    end_group(pid)
                os._exit(0)
            order, report, *given = descriptors
            pid = os.fork()
            if pid == 0:
                for left in (orders.detach(), *running, *(r for _, r in running.values())):
                    os.close(left)
                selector.close()
                return begin(order, report), given
            for sent in (order, *given):
                os.close(sent)
            ended = os.pidfd_open(pid)
            running[ended] = (pid, report)
            selector.register(ended, selectors.EVENT_READ)


def begin(order, report):
    """Return the order that this fork has, and report its id: a session of its own has begun by then."""
    with open(order) as file:
        order = json.load(file)
    if order["new_session"]:
        os.setsid()
    os.write(report, f"{os.getpid()}\n".encode())
    os.close(report)
    return order


def become(order, given):
    """Give this fork the streams, folder, environment, arguments, warnings and seeds that a new Python would have."""
    above = 1 + max([2, *given, *order["passed"]])  # above all numbers that are in use
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(moved, (0, 1, 2, *order["passed"]), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order["cwd"])
    before = os.environ.get("PYTHONPATH", "")
    for name in set(os.environ) - set(order["env"]):
        del os.environ[name]
    os.environ.update(order["env"])
    added = [
        p for p in os.environ.get("PYTHONPATH", "").split(":") if p and p not in before.split(":")
    ]
    sys.path[:0] = [order["path"], *added]
    sys.argv[:] = order["argv"]
    if os.environ.get("PYTHONUNBUFFERED") or order["unbuffered"]:
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True
        )
    for action in order["warnings"]:
        warnings.simplefilter(action)
    numpy.random.seed()
    faulthandler.enable()


load(sys.argv[2:])
del sys.path[0]
order, given = next_program(socket.socket(fileno=int(sys.argv[1])))
become(order, given)
end.is_script = order["name"] == "script"
kind, source = order["kind"], order["source"]
if kind == "-m":
    __spec__ = importlib.util.find_spec(source)
    if __spec__.submodule_search_locations is not None:
        __spec__ = importlib.util.find_spec(f"{source}.__main__")
    __file__, __package__, __loader__ = __spec__.origin, __spec__.parent, __spec__.loader
    code = __loader__.get_code(__spec__.name)
    sys.argv[0] = __file__
elif kind == "-c":
    code = compile(source, order["name"], "exec")
    del __file__
else:
    with open(source, "rb") as file:
        code = compile(file.read(), source, "exec")
    __file__ = source
    del file
__doc__ = None
for name in set(globals()) - {"name", "end", "code"} - OWN:
    del globals()[name]
del name
end.run(code, globals())
