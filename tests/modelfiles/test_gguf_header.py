"""GGUF headers: counts are checked before anything is allocated."""

import struct
import time
from pathlib import Path

import pytest

from maxhydra.modelfiles import check_gguf_header


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int, entries: int, *parts: bytes) -> bytes:
    return (b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(parts)).ljust(4096, b"\0")


ARRAY, STRING, UINT8 = struct.pack("<I", 9), struct.pack("<I", 8), struct.pack("<I", 0)


def array(kind: bytes, count: int) -> bytes:
    return text(b"a") + ARRAY + kind + struct.pack("<Q", count)


CASES = {
    "array": (header(0, 1, array(UINT8, 10**8)), "items of an array: 100000000"),
    "array over the file": (header(0, 1, array(UINT8, 10**6)), "announces 1000000 bytes"),
    "texts over the file": (header(0, 1, array(STRING, 10**6)), "announces|but has only"),
    "nested": (header(0, 1, array(ARRAY, 2)), "an array of arrays"),
    "entries": (header(0, 2**40), "metadata entries: 1099511627776"),
    "tensors": (header(2**40, 0), "tensors: 1099511627776"),
    "text": (header(0, 1, struct.pack("<Q", 2**63)), "announces 9223372036854775808 bytes"),
    "type": (header(0, 1, text(b"a") + struct.pack("<I", 77)), "unknown type 77"),
    "dimensions": (header(1, 0, text(b"a") + struct.pack("<I", 10**6)), "dimensions of a tensor: 1000000"),
    "numbers": (header(1, 0, text(b"a") + struct.pack("<IQQ", 2, 2**40, 2**40)), "numbers of a tensor"),
    "empty": (b"", "is too small"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_header_that_announces_too_much_is_rejected(name: str, tmp_path: Path) -> None:
    content, expected = CASES[name]
    (tmp_path / "x.gguf").write_bytes(content)
    start = time.process_time()
    with pytest.raises(ValueError, match=expected):
        check_gguf_header(tmp_path / "x.gguf")
    assert time.process_time() - start < 2
