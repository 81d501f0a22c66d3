"""Programs whose samples set something for the whole process, or change an object of a library that they share."""

from __future__ import annotations

from tests.verdicts.process_cases import NP, TORCH
from tests.verdicts.programs import Case

LOGGING, PILLOW = "import logging\n", "from PIL import Image, ImageDraw\n"


def sets(name: str, culprit: str, body: str, top: str, needs: str = "", init: str = "pass") -> Case:
    """Return a case that is named for its setting."""
    return Case(f"set {name}", culprit, f"{body}; return i", top, init, needs=needs)


OF_LIBRARIES = [
    sets("basicConfig", "basicConfig", "logging.basicConfig(level=10)", LOGGING),
    sets("logging disabled", "disable", "logging.disable(30)", LOGGING),
    sets("a logger's level", "LOG", "LOG.setLevel(i)", LOGGING + "LOG = logging.getLogger('x')\n"),
    sets("level at once", "getLogger", "logging.getLogger('x').setLevel(i)", LOGGING),
    sets("mimetypes", "add_type", "mimetypes.add_type('a/b', '.zz')", "import mimetypes\n"),
    sets("field size", "field_size", "csv.field_size_limit(9_999)", "import csv\n"),
    sets("dialect", "register_dialect", "csv.register_dialect('x')", "import csv\n"),
    sets("adapter", "register_adapter", "register_adapter(set, str)", "from sqlite3 import *\n"),
    sets(
        "namespace",
        "register_namespace",
        "ET.register_namespace('a', 'b')",
        "import xml.etree.ElementTree as ET\n",
    ),
    sets("codec", "register_error", "codecs.register_error('x', print)", "import codecs\n"),
    sets(
        "identity by an attribute", "getpid", "self.f()", "import os\n", init="self.f = os.getpid"
    ),
    sets("identity by a table", "getpid", "T['a']()", "import os\nT = {'a': os.getpid}\n"),
    sets("code by an attribute", "eval", "self.f('1')", "", init="self.f = eval"),
    sets("exit", "register", "atexit.register(print)", "import atexit\n"),
    sets("thresholds", "set_threshold", "gc.set_threshold(900)", "import gc\n"),
    sets("traces", "tracemalloc", "tracemalloc.start()", "import tracemalloc\n"),
    sets(
        "start method",
        "set_start_method",
        "mp.set_start_method('fork')",
        "import torch.multiprocessing as mp\n",
    ),
    sets("text domain", "textdomain", "gettext.textdomain('a')", "import gettext\n"),
    sets("mock", "mock", "mock.patch('os.getcwd').start()", "from unittest import mock\n"),
    sets("denormal", "set_flush_denormal", "torch.set_flush_denormal(True)", TORCH),
    sets("anomaly", "set_detect_anomaly", "torch.autograd.set_detect_anomaly(True)", TORCH),
    sets("mkldnn", "mkldnn.flags", "torch.backends.mkldnn.flags(enabled=False)", TORCH),
    sets("hub", "set_dir", "torch.hub.set_dir('x')", TORCH),
    sets("options", "options", "pd.options.display.max_rows = i", "import pandas as pd\n"),
    sets("yaml", "add_constructor", "yaml.add_constructor('!x', print)", "import yaml\n"),
    sets("extension", "register_extension", "Image.register_extension('Z', '.z')", PILLOW),
    sets(
        "truncated",
        "ImageFile",
        "ImageFile.LOAD_TRUNCATED_IMAGES = True",
        "from PIL import ImageFile\n",
    ),
    sets(
        "filters within rasterio",
        "rasterize",
        "rasterize([], out_shape=(8, 8))",
        "from rasterio.features import rasterize\n",
        "rasterio",
    ),
    sets("netCDF4", "Dataset", "Nc('x.nc')", "from netCDF4 import Dataset as Nc\n", "netCDF4"),
    sets(
        "ITK's threads",
        "DefaultNumberOfThreads",
        "sitk.ProcessObject.SetGlobalDefaultNumberOfThreads(1)",
        "import SimpleITK as sitk\n",
        "SimpleITK",
    ),
]

OBJECTS_OF_LIBRARIES = [
    Case(
        "kept decompressor",
        "D",
        "return D.decompress(b'')",
        "import zlib\nD = zlib.decompressobj()\n",
    ),
    Case(
        "kept parser",
        "PARSER",
        "PARSER.feed('a'); return i",
        "from html.parser import *\nPARSER = HTMLParser()\n",
    ),
    Case(
        "kept matcher",
        "SM",
        "SM.set_seq2('a'); return i",
        "import difflib\nSM = difflib.SequenceMatcher()\n",
    ),
    Case(
        "kept tree",
        "ROOT",
        "ROOT.set('a', 'b'); return i",
        "import xml.etree.ElementTree as ET\nROOT = ET.Element('a')\n",
    ),
    Case(
        "kept options",
        "CP",
        "CP.set('a', 'b', 'c'); return i",
        "import configparser\nCP = configparser.ConfigParser()\n",
    ),
    Case("kept mmap", "M", "M.seek(i); return M.read(1)", "import mmap\nM = mmap.mmap(-1, 8)\n"),
    Case(
        "mmap of the dataset",
        "dataset.m",
        "self.m.seek(i); return self.m.read(1)",
        "import mmap\n",
        "self.m = mmap.mmap(-1, 8)",
    ),
    Case(
        "kept connection",
        "DB",
        "return DB.execute('select 1').fetchone()",
        "import sqlite3\nDB = sqlite3.connect(':memory:')\n",
    ),
    Case(
        "buffer read into",
        "BUF",
        "open(__file__, 'rb').readinto(BUF); return i",
        "BUF = bytearray(4)\n",
    ),
    Case(
        "buffer packed into",
        "BUF",
        "struct.pack_into('B', BUF, 0, i); return i",
        "import struct\nBUF = bytearray(4)\n",
    ),
    Case(
        "pasted on",
        "BG",
        "BG.paste(i, (0, 0, 4, 4)); return i",
        PILLOW + "BG = Image.new('L', (8, 8))\n",
    ),
    Case(
        "pixel", "BG", "BG.putpixel((0, 0), i); return i", PILLOW + "BG = Image.new('L', (8, 8))\n"
    ),
    Case(
        "drawn on",
        "BG",
        "ImageDraw.Draw(BG).line((0, 0, i, i)); return i",
        PILLOW + "BG = Image.new('L', (8, 8))\n",
    ),
    Case(
        "drawn on data",
        "images",
        "x = self.images[i]; cv2.rectangle(x, (0, 0), (i, i), 1); return x",
        NP + "import cv2\n",
        "self.images = np.zeros((50, 512, 1024), 'u1')",
        needs="cv2",
    ),
    Case(
        "destination",
        "OUT",
        "cv2.blur(np.zeros((8, 8)), (3, 3), dst=OUT); return i",
        NP + "import cv2\nOUT = np.zeros((8, 8))\n",
        needs="cv2",
    ),
    Case(
        "variation of a font",
        "FONT",
        "FONT.set_variation_by_axes([i]); return i",
        "from PIL import ImageFont\nFONT = ImageFont.load_default()\n",
    ),
    Case(
        "image that was not loaded",
        "open file",
        "return list(IMAGE.getdata())",
        """
        import io
        from PIL import Image
        BYTES = io.BytesIO()
        Image.new('L', (8, 8)).save(BYTES, 'PNG')
        IMAGE = Image.open(io.BytesIO(BYTES.getvalue()))
        """,
    ),
    Case("train mode", "NET", "NET.train(); return i", TORCH + "NET = torch.nn.Dropout()\n"),
    Case(
        "hook",
        "NET",
        "NET.register_forward_hook(print); return i",
        TORCH + "NET = torch.nn.Dropout()\n",
    ),
    Case(
        "frame",
        "DF",
        "DF.loc[i, 'a'] = i; return i",
        "import pandas as pd\nDF = pd.DataFrame({'a': [0]})\n",
    ),
    Case(
        "sorted frame",
        "DF",
        "DF.sort_values('a', inplace=True); return i",
        "import pandas as pd\nDF = pd.DataFrame({'a': [0]})\n",
    ),
    Case(
        "tokenizer of the module",
        r"TOKENIZER.*keep",
        "return TOKENIZER(['a'], truncation=True, max_length=i + 1)",
        """
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        """,
        needs="transformers",
    ),
]

SETTINGS = [*OF_LIBRARIES, *OBJECTS_OF_LIBRARIES]
