"""The table of issue 33: programs that torch's worker processes read rightly, line by line."""

from __future__ import annotations

from tests.safety.table_run import Program

BOXES = """
    import numpy as np
    def rows(): return [{"boxes": np.ones((3, 4)), "id": k} for k in range(2_000)]
    """
PIPE = """
    class Pipe:
        def __init__(self, name):
            self.name, self.n, self.hook = name, 0, self.run
        def run(self):
            self.n += 1
            return self.n
        def is_default(self): return self is DEFAULT
        def index(self): return ALL.index(self) if self in ALL else -1
        def weight(self): return WEIGHTS.get(self, -1)
    DEFAULT, OTHER = Pipe("default"), Pipe("other")
    ALL = [OTHER, DEFAULT]
    WEIGHTS = {DEFAULT: 3, OTHER: 4}
    def look():
        return DEFAULT.is_default(), DEFAULT.index(), DEFAULT.weight(), type(DEFAULT) is Pipe, DEFAULT.n
    """
CONFIG = """
    class Config:
        def __init__(self, n):
            self.n, self.seen = n, []
        def __eq__(self, other): return type(self) is type(other) and self.n == other.n
        def __hash__(self): return hash(self.n)
        def like(self): return type(self)(self.n)
        def note(self, i):
            self.seen.append(i)
            return len(self.seen) > 0
    CFG = Config(1)
    HANDLERS = {Config: "config"}
    KEPT = []
    """

SHARED_DATA = [
    Program(
        6,
        "boxes *= 2",
        "boxes = self.rows[i]['boxes']; boxes *= 2; return float(boxes[0, 0])",
        BOXES,
        "self.rows = rows()",
    ),
    Program(
        6,
        "tokens.append(EOS)",
        "tokens = self.tokens[i]; tokens.append(0); return len(tokens)",
        "",
        "self.tokens = [[k] for k in range(2_000)]",
    ),
    Program(
        6,
        "x = self.big[i]; x /= 2",
        "x = self.big[i]; x /= 2; return float(x[0])",
        "import torch\n",
        "self.big = torch.ones(48, 100_000)",
    ),
    *(
        Program(
            7,
            f"a cache in shared memory: {name}",
            """
            if not self.use_cache:
                self.cache[i] = i + 1
            return float(self.cache[i])
            """,
            """
            import multiprocessing as mp, os, tempfile
            from multiprocessing import shared_memory
            import numpy as np
            import torch
            def between(dataset, epoch): dataset.use_cache = True
            """,
            f"{code}\nself.use_cache = False",
        )
        for name, code in {
            "mp.Array as a tensor": """
shared = mp.Array('f', 48)
self.cache = torch.from_numpy(np.ctypeslib.as_array(shared.get_obj()))""",
            "mp.Array as an array": """
shared = mp.Array('f', 48)
self.cache = np.ctypeslib.as_array(shared.get_obj())""",
            "SharedMemory": """
self.shm = shared_memory.SharedMemory(create=True, size=4 * 48)
self.cache = torch.frombuffer(self.shm.buf, dtype=torch.float32, count=48)
self.shm.unlink()""",
            "a memory map": """
self.cache = torch.from_numpy(np.memmap(tempfile.TemporaryFile(), np.float32, 'w+', shape=48))""",
            "share_memory_": "self.cache = torch.zeros(48).share_memory_()",
        }.items()
    ),
    Program(
        7,
        "a list of 2,000 shuffled in place between epochs",
        "return self.items[i]",
        """
        import random
        def between(dataset, epoch): random.shuffle(dataset.items)
        """,
        "self.items = list(range(2_000))",
        length=2_000,
        batch=100,
    ),
]

NUMBA = [
    Program(
        8,
        "a numba function",
        "return total(np.full(8, float(i)))",
        """
        import numba
        import numpy as np
        @numba.njit
        def total(x): return x.sum()
        total(np.zeros(8))
        """,
        needs="numba",
    ),
    Program(
        9,
        "numba's parallel=True",
        "return total(np.full(100, float(i)))",
        """
        import numba
        import numpy as np
        @numba.njit("float64(float64[:])", parallel=True)
        def total(x):
            s = 0.0
            for k in numba.prange(len(x)):
                s += x[k]
            return s
        """,
        needs="numba",
        env={"NUMBA_THREADING_LAYER": "workqueue"},
        rare=True,
    ),
]

OF_MODULES = [
    Program(
        9,
        "state at the top of an installed package",
        "return pairs.both(i)",
        "from PKG import pairs\n",
        files={
            "site-packages/PKG/__init__.py": "",
            "site-packages/PKG/pairs.py": """
                CURRENT = {}
                def both(i):
                    CURRENT["left"] = i
                    text = "".join(str(k) for k in range(50))
                    CURRENT["right"] = CURRENT["left"]
                    return CURRENT["left"], CURRENT["right"], len(text)
                def look(): return dict(CURRENT)
                """,
        },
    ),
    Program(
        9,
        "torch.set_default_dtype",
        """
        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        return str(torch.zeros(1).dtype)
        """,
        "import torch\n",
    ),
    Program(
        10,
        "self is DEFAULT",
        "return int(DEFAULT.is_default()), DEFAULT.run() > 0",
        PIPE,
    ),
    Program(10, "ALL.index(self)", "return DEFAULT.index(), DEFAULT.run() > 0", PIPE),
    Program(10, "a dict keyed by self", "return DEFAULT.weight(), DEFAULT.hook() > 0", PIPE),
    Program(
        10,
        "self is DEFAULT, held by the dataset",
        "return self.pipe.is_default(), self.pipe.index(), self.pipe.weight()",
        PIPE,
        "self.pipe = DEFAULT",
    ),
]

MAIN_THREAD = [
    Program(
        11,
        "CFG == Config(1)",
        "return CFG.n, CFG.note(i)",
        CONFIG
        + "def look(): return CFG == Config(1), Config(1) == CFG, CFG in [Config(1)], list(CFG.seen)\n",
    ),
    Program(
        11,
        "HANDLERS.get(type(CFG))",
        "return CFG.n, CFG.note(i)",
        CONFIG + "def look(): return HANDLERS.get(type(CFG)), type(CFG) is Config\n",
    ),
    Program(
        11,
        "type(self)(...) kept after the loop",
        "return CFG.n, CFG.note(i)",
        CONFIG
        + """
    def loop(batch):
        KEPT.append(CFG.like())
        return 0
    def look(): return all(type(each) is Config and each == Config(1) for each in KEPT)
    """,
    ),
    Program(
        12,
        "torch.compile(net) in the loop",
        """
        with torch.no_grad():
            return net(torch.full((4,), float(i))).sum()
        """,
        """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        fast = torch.compile(net, backend="eager")
        X = torch.ones(2, 4)
        def loop(batch):
            torch._dynamo.reset()
            return torch.equal(fast(X), net(X))
        """,
        rare=True,
    ),
]

TABLE = [*SHARED_DATA, *NUMBA, *OF_MODULES, *MAIN_THREAD]
