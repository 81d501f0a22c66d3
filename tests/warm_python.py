"""A Python that has imported torch and fastload, has started no thread, and forks itself for each program.

    python warm_python.py SOCKET MODULE...

`tests.children` sends orders over the socket. An order is a byte with five descriptors: the order as JSON, the
program's standard input, output and error, and a pipe for the report. The report is the fork's process id, then
its wait status and the moment of its end. A fork returns from `next_program` into the last lines of this file,
which run the program in the namespace of `__main__`. So it begins and ends as `python -c`, `python -m` or
`python FILE` does. If the socket closes, the server kills its programs and ends.
"""

import array
import atexit
import faulthandler
import gc
import importlib.util
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


def receive(orders):
    """Return the five descriptors of the next order, or None if the tests have ended."""
    size = array.array("i").itemsize
    message, ancillary, _, _ = orders.recvmsg(1, socket.CMSG_SPACE(5 * size))
    if not message:
        return None
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    return list(descriptors)


def next_program(orders):
    """Fork for each order. Return in the fork only: the order and the program's standard streams."""
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
            order, *streams, report = descriptors
            pid = os.fork()
            if pid == 0:
                for left in (orders.detach(), report, *running, *(r for _, r in running.values())):
                    os.close(left)
                selector.close()
                with open(order) as file:
                    return json.load(file), streams
            for given in (order, *streams):
                os.close(given)
            os.write(report, f"{pid}\n".encode())
            ended = os.pidfd_open(pid)
            running[ended] = (pid, report)
            selector.register(ended, selectors.EVENT_READ)


def become(order, streams):
    """Give this fork the streams, folder, environment, arguments, warnings and seeds that a new Python would have."""
    if order["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        if stream != number:
            os.close(stream)
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
        sys.stdout.reconfigure(write_through=True)
    for action in order["warnings"]:
        warnings.simplefilter(action)
    numpy.random.seed()
    faulthandler.enable()


for module in sys.argv[2:]:
    __import__(module)
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
del sys.path[0]
gc.collect()
gc.freeze()  # a fork that does not collect what was imported does not copy its pages
order, streams = next_program(socket.socket(fileno=int(sys.argv[1])))
become(order, streams)
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
