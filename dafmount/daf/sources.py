"""The one door through which every command but the mount opens what the user typed.

Owns nothing but that a new kind of source becomes readable to all of them in one place. Any thread may call it.
"""

from __future__ import annotations

from dafmount.daf.http_layout import ListedDaf
from dafmount.source.http_settings import HttpSettings
from dafmount.source.resolve import Resolved, resolve
from dafmount.source.spool import Spool


def open_source(source: str, *, spool: Spool, verify: str = "auto") -> Resolved:
    """A source, opened; see `resolve`. The caller closes its archive. A URL is read with the usual settings."""
    return resolve(source, spool=spool, verify=verify, http=HttpSettings(), list_directory=ListedDaf)
