"""Mount Daf data sets, packed or flat, local or in a ZIP archive, as plain flat files; or read them as numpy arrays.

    >>> import dafmount
    >>> with dafmount.open("cells.daf.zip") as daf:
    ...     daf.axes, daf.matrices("cell", "gene")
    ...     daf.axis_entries("gene")[:2]
    ...     daf.vector("cell", "type")[:3]
    ...     umis = daf.matrix("cell", "gene", "UMIs")
    ...     umis.shape, umis[:4, 0]
    (('cell', 'gene'), ('UMIs', 'spliced'))
    ['GENE1', 'GENE2']
    array(['Astrocyte', 'Oligodendrocyte', 'Oligodendrocyte'], dtype=object)
    ((400, 60), array([4, 4, 4, 2], dtype=uint32))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from dafmount.arrays.daf import Daf

__version__ = "0.1.0"


def open(
    source: str | os.PathLike[str],
    *,
    cache_bytes: int = 64 << 20,
    spool: Path | None = None,
    spool_bytes: int = 4 << 30,
    verify: bool = True,
) -> Daf:
    """A Daf for reading: a FilesDaf directory, `x.daf.zip`, `x.dafs.zip#/group`.

    Keeps up to `cache_bytes` of decoded chunks. Entries of a ZIP archive that are compressed once more are decoded to
    files in `spool` ($TMPDIR or /var/tmp), at most `spool_bytes` of them. With `verify` the checksum of every chunk is
    checked as it is read. Raises an error of `dafmount.errors` (NotFound, GroupNotFound, NotADaf, CorruptArchive,
    UnsupportedFormat), or the OSError of a local file.
    """
    import os

    from dafmount.arrays.daf import open_daf

    return open_daf(os.fspath(source), cache_bytes=cache_bytes, spool=spool, spool_bytes=spool_bytes, verify=verify)
