"""The table of issue 33, lines 1 to 5: what a process has one of, and what is for one thread."""

from __future__ import annotations

from tests.verdicts.table_run import Program

OF_THE_PROCESS = [
    Program(
        1,
        "pyplot",
        """
        plt.figure(figsize=(1, 1), dpi=32)
        plt.axis("off")
        plt.ylim(0, 31)
        plt.bar([0], [i])
        file = io.BytesIO()
        plt.savefig(file, format="png")
        plt.close()
        return int((np.asarray(Image.open(file).convert("L")) < 128).sum())
        """,
        """
        import io
        import matplotlib
        import numpy as np
        from PIL import Image
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        def look(): return plt.get_fignums()
        """,
        culprit="plt|pyplot",
        needs="matplotlib",
        length=16,
        batch=2,
    ),
    Program(
        1,
        "os.chdir",
        """
        os.makedirs(f"{HERE}/{i}", exist_ok=True)
        os.chdir(f"{HERE}/{i}")
        return int(os.path.basename(os.getcwd()))
        """,
        "import os\nHERE = os.path.dirname(os.path.abspath(__file__))\n",
        culprit="chdir",
    ),
    Program(
        1,
        "os.environ",
        "os.environ['ITEM'] = str(i); return int(os.environ['ITEM'])",
        "import os\n",
        culprit="environ",
    ),
    Program(
        1,
        "a scratch file named by os.getpid",
        """
        path = f"{HERE}/scratch_{os.getpid()}.npy"
        np.save(path, np.full(2_000, i))
        return int(np.load(path)[0])
        """,
        "import os\nimport numpy as np\nHERE = os.path.dirname(os.path.abspath(__file__))\n",
        culprit="getpid",
    ),
    Program(
        1,
        "warnings.catch_warnings",
        """
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warnings.warn(f"sample {i}")
        return [str(each.message) for each in said]
        """,
        "import warnings\n",
        culprit="catch_warnings",
    ),
    Program(
        2,
        "contextlib.redirect_stdout",
        """
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print(i)
        return text.getvalue()
        """,
        "import contextlib, io\n",
        culprit="redirect_stdout",
    ),
]

FOR_ONE_THREAD = [
    Program(
        3,
        "a CLAHE object of the module",
        "return int(CLAHE.apply(IMAGES[i % 8]).astype(int).sum())",
        """
        import cv2
        import numpy as np
        IMAGES = np.random.default_rng(0).integers(0, 200, (8, 256, 256)).astype(np.uint8)
        CLAHE = cv2.createCLAHE(2.0, (8, 8))
        """,
        culprit="CLAHE",
        needs="cv2",
    ),
    Program(
        3,
        "a zstandard decompressor of the module",
        "return UNPACK.decompress(FRAMES[i % 8]).decode()[:20]",
        """
        import zstandard
        FRAMES = [zstandard.compress(f"{k:_>20}".encode() * 5_000) for k in range(8)]
        UNPACK = zstandard.ZstdDecompressor()
        """,
        culprit="UNPACK|[Zz]std",
        needs="zstandard",
    ),
    Program(
        4,
        "a thread-local of the module",
        "return HERE.scale * i",
        """
        import threading
        HERE = threading.local()
        HERE.scale = 2
        def look(): return HERE.scale
        """,
        culprit="HERE|local",
    ),
    Program(
        4,
        "a thread-local of the dataset",
        "return getattr(self.here, 'scale', -1) * i",
        "import threading\n",
        "self.here = threading.local(); self.here.scale = 2",
        culprit="local",
    ),
    Program(
        4,
        "a context variable set in the main thread",
        "return MODE.get() * i",
        """
        from contextvars import ContextVar
        MODE = ContextVar("MODE", default=0)
        MODE.set(2)
        def look(): return MODE.get()
        """,
        kind="thread",
    ),
    Program(
        4,
        "torch's safe globals",
        """
        file = io.BytesIO(SAVED)
        return torch.load(file, weights_only=True).x
        """,
        """
        import io
        import torch
        class Box:
            def __init__(self, x): self.x = x
        file = io.BytesIO()
        torch.save(Box(5), file)
        SAVED = file.getvalue()
        torch.serialization.add_safe_globals([Box])
        def look(): return len(torch.serialization.get_safe_globals())
        """,
        kind="thread",
    ),
    Program(
        4,
        "safe globals in the sample",
        """
        with torch.serialization.safe_globals([Box]):
            return torch.load(io.BytesIO(SAVED), weights_only=True).x
        """,
        """
        import io
        import torch
        class Box:
            def __init__(self, x): self.x = x
        file = io.BytesIO()
        torch.save(Box(5), file)
        SAVED = file.getvalue()
        def look(): return len(torch.serialization.get_safe_globals())
        """,
        culprit="safe_globals",
    ),
    Program(
        4,
        "scikit-learn's output set in the main thread",
        "return type(SCALER.transform(FRAME.iloc[i : i + 1])).__name__",
        """
        import numpy as np
        import pandas as pd
        import sklearn
        from sklearn.preprocessing import StandardScaler
        sklearn.set_config(transform_output="pandas")
        FRAME = pd.DataFrame({"a": np.arange(48.0), "b": np.arange(48.0) ** 2})
        SCALER = StandardScaler().fit(FRAME)
        """,
        culprit="sklearn",
        needs="sklearn",
    ),
    Program(
        4,
        "decord's bridge",
        "return type(decord.bridge.bridge_out(decord.nd.array(X))).__module__",
        """
        import decord
        import numpy as np
        X = np.zeros(3, np.float32)
        decord.bridge.set_bridge("torch")
        """,
        culprit="decord",
        needs="decord",
    ),
    Program(
        5,
        "signal.setitimer",
        """
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05 if i == 5 else 5.0)
        try:
            while i == 5:
                pass
            return i
        except Late:
            return -1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        """,
        """
        import signal
        class Late(Exception): pass
        def late(*_): raise Late
        """,
        culprit="signal",
    ),
    Program(
        5,
        "signal.alarm",
        """
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(60)
        left = signal.alarm(0)
        return i if left in (59, 60) else -1
        """,
        "import signal\n",
        culprit="signal|alarm",
    ),
    Program(
        5,
        "asyncio.get_event_loop",
        """
        async def get():
            await asyncio.sleep(0)
            return i
        return asyncio.get_event_loop().run_until_complete(get())
        """,
        "import asyncio\n",
        culprit="get_event_loop",
    ),
    Program(
        5,
        "an event loop made in __init__",
        """
        async def get():
            await asyncio.sleep(0)
            return i
        return self.loop.run_until_complete(get())
        """,
        "import asyncio\nLOOP = asyncio.new_event_loop()\n",
        "self.loop = LOOP",
        culprit="loop",
    ),
]

THREAD_AND_PROCESS = [*OF_THE_PROCESS, *FOR_ONE_THREAD]
