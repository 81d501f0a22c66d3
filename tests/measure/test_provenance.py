"""Promise: Figures come with the machine and the versions that they were measured on, without host and user."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

from fastload.measure.provenance import provenance

ROOT = Path(__file__).parents[2]


def test_the_provenance_names_machine_and_versions_but_neither_host_nor_user() -> None:
    origin = provenance(["fastload", "bench"])
    assert origin["machine"]["cores"] == os.cpu_count()
    assert origin["versions"]["torch"]
    assert origin["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    text = json.dumps(origin)
    for private in (socket.gethostname(), str(Path.home()), str(ROOT)):
        assert not re.search(rf"(?<![\w.-]){re.escape(private)}(?![\w.-])", text), private
