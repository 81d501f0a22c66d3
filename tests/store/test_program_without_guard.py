"""Promise: `prepare` in a program without `if __name__ == "__main__":` ends with a sentence, and never waits for
itself.
"""

import subprocess
import sys

_PROGRAM = """
from fastload.store import prepare

def make(source):
    return {"x": [source]}

prepare(make, [1, 2], "a", root=ROOT, workers=1)
"""


def test_a_program_without_guard_ends(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.replace("ROOT", repr(str(tmp_path / "sets"))))
    ended = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert 'Call it under `if __name__ == "__main__":`' in ended.stderr
