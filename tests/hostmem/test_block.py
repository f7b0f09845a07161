"""Host memory of a process's own, in huge pages where Linux gives them."""

import mmap
from pathlib import Path

import pytest

from offplan.hostmem.block import HostBlock

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def read_huge_bytes(address: int) -> int:
    """Add up the huge pages of the mapping that has an address, by /proc/self/smaps."""
    is_here, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and ":" not in name:
            first, stop = (int(each, 16) for each in name.split("-"))
            is_here = first <= address < stop
        elif is_here and name in ("AnonHugePages:", "ShmemPmdMapped:"):
            found += int(rest[0]) << 10
    return found


def test_blocks_have_huge_pages() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE") or not ENABLED.exists():
        pytest.skip("this system has no transparent huge pages")
    if "[never]" in ENABLED.read_text():
        pytest.skip("this system gives no transparent huge pages")
    block = HostBlock(64 << 20, pin=False)
    block.tensor.fill_(1)
    assert read_huge_bytes(block.tensor.data_ptr()) >= block.nbytes // 2
    block.close()
