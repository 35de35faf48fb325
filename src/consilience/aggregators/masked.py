"""Add up sites' numbers so that the hub sees their totals and nothing else.

Every pair of sites shares a random number that one adds to its own and the other subtracts. What a
site sends is then uniform, whatever it holds, and in the sum of all messages the pairs cancel. This
is a one-time pad, not a cipher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SchemaMismatch, SettingsError

Words = NDArray[np.uint64]


class MaskedSum:
    """One site's part in one sum of `length` numbers over `n_sites` sites, numbered from 0.

    The site sends ``to_send[q]`` to site q over a channel that the hub cannot read, passes what it
    gets from sites of lower number to `receive`, and sends the hub what `hide` returns. Then
    `add_up` at the hub.

    Parameters
    ----------
    grain
        Numbers are rounded to whole multiples of 1/grain; public, and the same at all sites.

    Privacy
    -------
    Protects a site's numbers against a hub and other sites that follow the protocol and are
    curious. The hub learns the totals; together with some of the sites, the total of the others.
    Not against sites that send false numbers, not if a site is alone among colluders, not after a
    drop-out unless all begin again with fresh masks. No differential privacy: totals are exact, so
    they must be public, or every site adds its own charged noise before
    (docs/guarantees/integration.md).

    Examples
    --------
    >>> sites = [MaskedSum(site, n_sites=3, length=2) for site in range(3)]
    >>> for one in sites:
    ...     for other, mask in one.to_send.items():
    ...         sites[other].receive(one.site, mask)
    >>> numbers = [[160, 120], [2000, 1600], [11000, 9000]]
    >>> messages = {one.site: one.hide(held) for one, held in zip(sites, numbers)}
    >>> add_up(messages, n_sites=3).tolist()
    [13160.0, 10720.0]
    """

    def __init__(self, site: int, *, n_sites: int, length: int, grain: int = 1) -> None:
        if not (n_sites >= 3 and 0 <= site < n_sites and length >= 1 and grain >= 1):
            raise SettingsError(
                "A masked sum needs at least three sites (of two, each could subtract its own "
                "number from the total), a site number below theirs, and a length and grain >= "
                "1. Nothing was drawn."
            )
        self.site, self.n_sites, self.length, self.grain = site, n_sites, length, grain
        self.to_send: dict[int, Words] = {
            other: np.frombuffer(os.urandom(8 * length), dtype=np.uint64)
            for other in range(site + 1, n_sites)
        }
        self._received: dict[int, Words] = {}
        self._used = False

    def receive(self, site: int, mask: ArrayLike) -> None:
        """Keep the mask that a site of lower number drew for this pair."""
        words = np.asarray(mask)
        if not 0 <= site < self.site or site in self._received or words.shape != (self.length,):
            raise SettingsError(
                f"Site {self.site} expects one mask of {self.length} words from each site of "
                f"lower number. Got another from site {site!r}. Nothing was kept."
            )
        self._received[site] = words.astype(np.uint64)

    def hide(self, numbers: ArrayLike) -> Words:
        """Return the message to the hub, once: a second one would reveal what changed."""
        if self._used or len(self._received) < self.site:
            raise SettingsError(
                f"Site {self.site} cannot send its numbers: "
                + ("its masks are used up" if self._used else "masks of other sites are missing")
                + ". Nothing was sent. Start a new sum with fresh masks at all sites."
            )
        given = np.asarray(numbers, dtype=np.float64)
        whole = np.rint(given * self.grain)
        if given.shape != (self.length,) or not (np.abs(whole) < 2.0**53 / self.n_sites).all():
            raise SettingsError(
                f"A masked sum of {self.n_sites} sites at grain {self.grain} takes {self.length} "
                "finite numbers whose total fits 53 bits. Nothing was sent. Choose a smaller "
                "grain."
            )
        self._used = True
        message = whole.astype(np.int64).astype(np.uint64)
        for mask in self._received.values():
            message = message - mask
        for mask in self.to_send.values():
            message = message + mask
        return message


def add_up(messages: Mapping[int, Any], *, n_sites: int, grain: int = 1) -> NDArray[np.float64]:
    """Return the totals, at the hub; every site's message must be there, or masks do not cancel."""
    words = [np.asarray(messages[site]) for site in sorted(messages)]
    if sorted(messages) != list(range(n_sites)) or len({one.shape for one in words}) != 1:
        raise SchemaMismatch(
            f"A masked sum needs one message from each of {n_sites} sites, all of one length. "
            "Nothing was added up: without a site the masks do not cancel. Begin again with "
            "fresh masks among those who are there."
        )
    total = np.sum(np.stack(words).astype(np.uint64), axis=0, dtype=np.uint64)
    return np.asarray(total.view(np.int64) / grain, dtype=np.float64)
