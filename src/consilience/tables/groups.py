"""Groups of records: capping the records of each person, dividing a table into sites.

Random numbers are arguments (`priority`); none is drawn here.
"""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from consilience.tables.problems import mismatch, quietly, require
from consilience.tables.values import as_array, as_texts, is_readable

# Of one person. Noise grows with it, so that more are no use; and a study's author chooses it,
# whereas every site pays.
MOST_RECORDS = 10_000
CAP = f"a whole number from 1 to {MOST_RECORDS:,}"


def is_cap(limit: object) -> bool:
    """Tell whether a person's records may be limited to that many."""
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    return whole and 0 < limit <= MOST_RECORDS  # type: ignore[operator]


def cap_records(persons: ArrayLike, limit: int, priority: ArrayLike) -> NDArray[np.bool_]:
    """Mark the records to keep: at most `limit` of each person, drawn uniformly at random.

    The draw of one person does not depend on other persons.

    Parameters
    ----------
    priority
        One independent uniform draw for each record; the lowest of each person are kept.
    """
    require(is_cap(limit), "limit", limit, CAP)
    ids = identify(persons)
    order = np.lexsort((_priorities(priority, len(ids)), ids))
    _, first, size = np.unique(ids[order], return_index=True, return_counts=True)
    keep = np.empty(len(ids), np.bool_)
    keep[order] = np.arange(len(ids)) - np.repeat(first, size) < limit
    return keep


def split_sites(
    records: Any,
    sites: int | str | ArrayLike,
    priority: ArrayLike | None = None,
    *,
    persons: Any = None,
) -> list[NDArray[np.intp]]:
    """Divide records into sites; return the indices of each site's records, ascending.

    Parameters
    ----------
    records
        The Arrow table, or the number of records.
    sites
        A number of sites of (nearly) equal size in records, or in persons if `persons` is given; or
        the site of each record, as an array or as a column of the table: one site for each distinct
        value, in ascending order.
    priority
        One independent uniform draw for each record; needed when `sites` is a number.
    persons
        Person of each record, array or column name. All records of a person go to the same site; a
        site column that says otherwise is an error.
    """
    n_records: int = getattr(records, "num_rows", records)
    sites, persons = (
        records[given] if isinstance(given, str) else given for given in (sites, persons)
    )
    person = np.arange(n_records) if persons is None else identify(persons)
    if isinstance(sites, int | np.integer):
        require(
            int(sites) > 0 and not isinstance(sites, bool),
            "sites",
            sites,
            "a positive number, or one id per record",
        )
        # The draw of a person's first record, not the lowest of all: that would favour persons with
        # many records.
        _, first, member = np.unique(person, return_index=True, return_inverse=True)
        order = np.argsort(_priorities(priority, n_records)[first], kind="stable")
        site_of = np.empty(len(first), np.intp)
        for site, part in enumerate(np.array_split(order, sites)):
            site_of[part] = site
        return [np.flatnonzero(site_of[member] == site) for site in range(sites)]
    ids = identify(sites)
    require(
        ids.shape == person.shape == (n_records,),
        "sites and persons",
        "these arrays",
        "one id for each record",
    )
    if (
        persons is not None
        and np.unique(np.stack([person, ids]), axis=1).shape[1] > np.unique(person).size
    ):
        fix = "Give each person one site, or split without persons."
        raise mismatch(["a person has records at several sites"], fix, "split")
    return [np.flatnonzero(ids == site) for site in np.unique(ids)]


def identify(values: ArrayLike) -> NDArray[np.intp]:
    """Return the rank of each id among the distinct ones, compared as trimmed text.

    This is the only place that compares ids. If one place took two ids for one person and another
    place for two, that person's records could move more than the noise was calibrated for.
    """
    ranks = quietly(partial(_ranks, values))
    if ranks is None:
        raise mismatch(
            ["a person or site id is missing, or neither text nor number"],
            "Give every record an id, as text or number.",
            "selected",
        )
    return ranks


def _ranks(values: ArrayLike) -> NDArray[np.intp] | None:
    array = as_array(values)
    if not is_readable(array.type, as_number=False):
        return None
    texts = array if pa.types.is_integer(array.type) else as_texts(array)
    ids = texts.dictionary_encode()
    order: NDArray[np.intp] = np.unique(
        ids.dictionary.to_numpy(zero_copy_only=False), return_inverse=True
    )[1]
    return None if texts.null_count else order[ids.indices.to_numpy()]


def _priorities(priority: ArrayLike | None, n_records: int) -> NDArray[np.float64]:
    draws = np.asarray(() if priority is None else priority, np.float64)
    usable = draws.shape == (n_records,) and not np.isnan(draws).any()
    require(
        usable,
        "priority",
        None if priority is None else "this array",
        "one uniform draw for each record",
    )
    return draws
