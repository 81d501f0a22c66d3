"""Promise: `prepare` in a program without `if __name__ == "__main__":` ends with a sentence, and never waits for
itself.
"""

from tests.children import run_python

_PROGRAM = """
from fastload.store import prepare

def make(source):
    return {"x": [source]}

prepare(make, [1, 2], "a", root=ROOT, workers=1)
"""


def test_a_program_without_guard_ends(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.replace("ROOT", repr(str(tmp_path / "sets"))))
    ended = run_python(program)
    assert ended.returncode == 1
    assert 'Call it under `if __name__ == "__main__":`' in ended.stderr
