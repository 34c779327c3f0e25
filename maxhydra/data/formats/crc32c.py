"""CRC-32C, masked as TFRecord files have it, of many payloads at once in NumPy.

A checksum is linear over XOR, so payloads are cut into blocks of WIDTH bytes that are worked on side by side, byte by
byte; then the blocks of each payload are joined, a checksum being moved on by WIDTH zero bytes with four table lookups.
Zeros before a payload change nothing while the register is 0, and starting from all ones is the same as inverting the
first four bytes.
"""

from collections.abc import Sequence

import numpy as np

POLYNOMIAL = 0x82F63B78
MASK = 0xA282EAD8
WIDTH = 64


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return table


BYTE = _byte_table()


def _moved_on(register: np.ndarray, count: int) -> np.ndarray:
    """Registers after so many zero bytes."""
    for _ in range(count):
        register = BYTE[register & 0xFF] ^ (register >> np.uint32(8))
    return register


# What each byte of a register becomes after WIDTH zero bytes.
BLOCK = [_moved_on(np.arange(256, dtype=np.uint32) << np.uint32(8 * place), WIDTH) for place in range(4)]


def masked_crc32c(payloads: Sequence[bytes]) -> np.ndarray:
    """The masked checksum of each payload: uint32 [n]."""
    plain = crc32c(payloads)
    return ((plain >> np.uint32(15)) | (plain << np.uint32(17))) + np.uint32(MASK)


def crc32c(payloads: Sequence[bytes]) -> np.ndarray:
    """The checksum of each payload: uint32 [n]."""
    if not payloads:
        return np.empty(0, np.uint32)
    # Payloads under four bytes have no room for the inverted start, and are done one by one.
    sizes = np.array([len(payload) for payload in payloads])
    blocks = np.maximum(-(-sizes // WIDTH), 1)
    last = np.cumsum(blocks)
    octets = np.zeros(int(last[-1]) * WIDTH, np.uint8)
    for payload, stop in zip(payloads, (last * WIDTH).tolist(), strict=True):
        octets[stop - len(payload) : stop] = np.frombuffer(payload, np.uint8)
    starts = last * WIDTH - sizes
    long = np.flatnonzero(sizes >= 4)
    octets[(starts[long, None] + np.arange(4)).ravel()] ^= 0xFF
    register = _joined(_of_blocks(octets.reshape(-1, WIDTH)), blocks, last) ^ np.uint32(0xFFFFFFFF)
    for index in np.flatnonzero(sizes < 4).tolist():
        register[index] = _short(payloads[index])
    return register


def _of_blocks(octets: np.ndarray) -> np.ndarray:
    register = np.zeros(len(octets), np.uint32)
    for column in np.ascontiguousarray(octets.T):
        register = BYTE[(register ^ column) & 0xFF] ^ (register >> np.uint32(8))
    return register


def _joined(of_blocks: np.ndarray, blocks: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Blocks of each payload in their order: payloads side by side, the one with most blocks sets the pace."""
    register = np.zeros(len(blocks), np.uint32)
    for place in range(int(blocks.max())):
        here = np.flatnonzero(blocks > place)
        before = register[here]
        moved = BLOCK[0][before & 0xFF]
        for byte in (1, 2, 3):
            moved = moved ^ BLOCK[byte][(before >> np.uint32(8 * byte)) & 0xFF]
        register[here] = moved ^ of_blocks[last[here] - blocks[here] + place]
    return register


def _short(payload: bytes) -> np.uint32:
    register = 0xFFFFFFFF
    for letter in payload:
        register = int(BYTE[(register ^ letter) & 0xFF]) ^ (register >> 8)
    return np.uint32(register ^ 0xFFFFFFFF)
