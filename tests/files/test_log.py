import pytest

from consilience.files.log import MOST_LISTED, ReleaseLog


def digests(n, seed="a"):
    return [f"{seed}{number:063x}" for number in range(n)]


def test_a_shortened_log_is_the_same_log():
    whole = ReleaseLog(digests=digests(600))
    short = whole.shorten()
    assert (short.length, len(short.digests)) == (600, MOST_LISTED)
    assert short.head_at(600) == whole.head_at(600)
    assert short.overlaps(whole)
    assert short.find_difference(whole) is None
    assert whole.find_difference(short.add("c" * 64).shorten()) is None
    assert ReleaseLog.from_dict(short.as_dict()) == short


@pytest.mark.parametrize(("changed", "seen"), [(5, 344), (343, 344), (500, 501), (599, 600)])
def test_another_release_is_seen_even_if_it_is_no_longer_listed(changed, seen):
    ours, theirs = digests(600), digests(600)
    theirs[changed] = "f" * 64
    short = ReleaseLog(digests=theirs).shorten()
    assert ReleaseLog(digests=ours).find_difference(short) == seen


def test_logs_of_different_times_cannot_be_compared():
    early, late = ReleaseLog(digests=digests(3)), ReleaseLog(digests=digests(600)).shorten()
    assert not early.overlaps(late)
    assert early.overlaps(ReleaseLog(digests=digests(200)))


@pytest.mark.parametrize(
    "facts",
    [
        {"before": -1, "head": "0" * 64, "digests": []},
        {"before": 0, "head": "0" * 63, "digests": []},
        {"before": 0, "head": "0" * 64, "digests": ["x" * 64]},
        {"before": 0, "head": "0" * 64, "digests": "0" * 64},
        {"before": True, "head": "0" * 64, "digests": []},
        {"before": 0, "head": None, "digests": [None]},
    ],
)
def test_what_is_no_log_is_refused(facts):
    with pytest.raises(ValueError, match="no log"):
        ReleaseLog.from_dict(facts)
