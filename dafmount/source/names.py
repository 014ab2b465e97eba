"""Names inside archives: how a ZIP entry's bytes become a clean path, and how a path is shown in a message.

Pure functions; knows nothing of files or of Daf. Any thread may call them. Clean paths are bytes, `/`-separated,
relative and without empty, `.` or `..` components; `decode` and `encode` turn them into the `str` paths of the
`Archive` seam.
"""

from __future__ import annotations

from dafmount.errors import NotFound

COMPONENT_LIMIT = 255
"""NAME_MAX of Linux, in bytes."""

PATH_LIMIT = 4095
"""PATH_MAX of Linux without the closing NUL, in bytes."""

DEPTH_LIMIT = 128
"""Directories above a name. A Daf needs four and its group's own; the limit bounds what one long name can cost."""


def shown(name: str) -> str:
    """`name` as a message may hold it: on one line, and encodable whatever bytes it was decoded from."""
    return name if name.isprintable() else ascii(name)


def decode(path: bytes) -> str:
    """The `str` of a path; bytes that are not UTF-8 become surrogate escapes."""
    return path.decode("utf-8", "surrogateescape")


def encode(path: str) -> bytes:
    """The bytes of a path that `decode` made; raises NotFound for text that stands for no bytes."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise NotFound(f"{shown(path)}: no such file, the name cannot be encoded") from error


def all_plain(names: list[bytes]) -> bool:
    """Whether every name is certainly a clean path already, found out for all of them together.

    False may be wrong; True never is.
    """
    joined = b"/%s/" % b"/\n/".join(names)
    if any(odd in joined for odd in (b"\\", b"\0", b"//")):
        return False
    if b"/." in joined and (b"/./" in joined or b"/../" in joined):
        return False
    if not joined.isascii():
        try:
            joined.decode("utf-8")
        except UnicodeDecodeError:
            return False
    # A path this short has no component too long, and is not too deep either.
    return max(map(len, names), default=0) <= COMPONENT_LIMIT


def clean(path: bytes) -> bytes | str:
    """The clean form of a path, or, as `str`, why it must be left out."""
    if b"\0" in path:
        return "a name that holds a NUL"
    if path.startswith(b"/"):
        return "an absolute name"
    components = [component for component in path.split(b"/") if component not in (b"", b".")]
    if b".." in components:
        return "a name that leads outside its directory"
    if len(path) > PATH_LIMIT or len(components) > DEPTH_LIMIT or any(len(c) > COMPONENT_LIMIT for c in components):
        return "a name longer or deeper than Linux and this program allow"
    return b"/".join(components)
