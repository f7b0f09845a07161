"""Who asks: whose prefixes a request goes on from, and in whose turn it is answered."""

from collections.abc import Hashable
from typing import NamedTuple

from offplan.serve.guard import Guard
from offplan.serve.requests import Request


class Client(NamedTuple):
    """The client that asks."""

    owner: Hashable
    """Whose prefixes: a text goes on from those of an equal owner alone."""
    turn: Hashable
    """Whose turn: clients take rows in turn, and wait up to a bound each."""


def identify(asked: Request, guard: Guard, address: str, *, shares_prefixes: bool) -> Client:
    """Tell the client of a request that came from an address.

    The server's key, or being on this machine, is the base of an identity; the request's own fields
    separate further. Without a base, these fields name an owner of prefixes, which others can claim
    only if they know it. A request without such fields shares with no other. Only without a base
    does the address decide turns: behind a proxy many clients have the same. Fields that strangers
    choose would get them as many turns as they like.
    """
    base = guard.api_key or ("here" if guard.is_local else None)
    owner: Hashable = (base, *asked.identity)
    if base is None and not asked.identity:
        owner = object()
    return Client(
        None if shares_prefixes else owner,
        ("address", address) if base is None else (base, *asked.identity),
    )
