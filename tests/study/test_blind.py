"""A blind study: what its file says, its masked sums, and the release that a batch becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from consilience import Budget, Ledger
from consilience.blind.masked import MaskedFile, unmask
from consilience.blind.pads import SealKey, add_words, subtract_words
from consilience.blind.roster import Rule
from consilience.errors import BudgetExceeded, ContributionRejected, SettingsError
from consilience.evaluation.table_one import TableOne
from consilience.files.certificate import of_release
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.learners.base import plan_fit
from consilience.privacy.accounting import SharedSum, alone, events_to_json
from consilience.statistics.base import Statistic
from consilience.study.check import build_for, check_release
from consilience.study.collect import Opened, Publication
from consilience.study.study import Study, check
from studies import blind_text, table
from wards import ROWS, Wards

SENDER: Any = {"site": "north", "signing": SigningKey.generate(), "dataset": "ward"}
KEYS = ("a" * 64, "b" * 64)


def test_the_rule_of_a_blind_study_is_part_of_its_digest() -> None:
    study = Study.from_text(blind_text(KEYS, shares=2, spare=1))
    assert study.is_blind
    assert study.blind == Rule(2, 1, KEYS)
    assert Study.from_dict(json.loads(json.dumps(study.to_dict()))) == study
    others = (
        blind_text(KEYS, shares=3, spare=1, min_sites=4),
        blind_text(KEYS, shares=2, spare=2, min_sites=4),
        blind_text(KEYS[:1], shares=2, spare=1),
    )
    digests = {Study.from_text(text).digest for text in others}
    assert len({study.digest, *digests}) == 4


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[blind]\nshares = 2\nspare = 1", "", "needs a part [blind]"),
        ('hub = "blind"', "", 'a part [blind] is for studies with hub = "blind"'),
        ('[statistic]\nname = "Moments"', "", "lacks 'name'"),
        ("delta = 1e-6", "", "needs delta > 0"),
        ("min_sites = 3", "", "below shares + spare = 3"),
        ("min_sites = 3", "min_sites = 3\nmax_weight = 0.5", "max_weight and withhold_far"),
        ("shares = 2", "shares = 1", "at least two sites"),
        ("spare = 1", "spare = true", "at least two sites"),
        ("spare = 1", "", "Add spare"),
        ('keyholders = ["', 'keyholders = ["x', "by their public keys"),
        ('keyholders = ["' + "a" * 64, 'keyholders = [3, "' + "a" * 64, "by their public keys"),
        ("spare = 1", "spare = 1\nthreshold = 2", "[blind] has no setting"),
    ],
)
def test_what_is_wrong_with_a_blind_study_is_said(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    text = blind_text(KEYS, shares=2, spare=1)
    assert old in text
    if old.startswith("[blind]"):
        text = text[: text.index("[blind]")]
    path = tmp_path / "study.toml"
    path.write_text(text.replace(old, new))
    assert any(problem in found for found in check(path)), check(path)


def test_a_blind_study_needs_a_statistic(tmp_path: Path) -> None:
    text = blind_text(KEYS, shares=2, spare=1)
    other = '[learner]\nname = "PrivateLogisticRegression"\n[aggregator]\nname = "Average"\n'
    path = tmp_path / "study.toml"
    path.write_text(text.replace('[statistic]\nname = "Moments"', other))
    assert any("name a [statistic]" in found for found in check(path))


def test_masked_sums_become_a_release(tmp_path: Path) -> None:
    """The same of every statistic: tests/hub/test_every_statistic.py."""
    wards = Wards(tmp_path)
    files = [wards.mask(i) for i in range(4)]
    release = wards.release(files)
    release.save(tmp_path / "release")
    again = check_release(wards.study, Release.load(tmp_path / "release", key=wards.hub.public))
    X = wards.study.schema.encode(table(500, seed=7)).X
    assert (again.predict(X) == table(500, seed=7)["ill"].to_numpy()).mean() > 0.6
    assert again.guarantee.epsilon == pytest.approx(files[0].guarantee.epsilon)
    assert any("keyholders follow the protocol" in each for each in again.guarantee.assumptions)
    assert "keyholders follow the protocol" in of_release(again).as_html()


def test_a_blind_hub_makes_the_first_table_of_a_paper(tmp_path: Path) -> None:
    """The interval of a mean is taken ten times as wide: it is missed with 1e-80."""
    wards = Wards(tmp_path, statistic="Summary", least=3.0)
    release = wards.release([wards.mask(i, epsilon=3.0) for i in range(4)])
    made = TableOne.of(release.ensemble, wards.study.schema)
    rows = {(row.column, row.what): row.measures[-1] for row in made.rows}
    ages = np.concatenate([table(ROWS, seed=i)["age"].to_numpy() for i in range(4)])
    assert rows["", "records"].value == pytest.approx(4 * ROWS)
    mean = rows["age", "mean"]
    assert mean.value == pytest.approx(ages.mean(), abs=5 * (mean.high - mean.low))
    assert mean.high - mean.low < 40


@pytest.mark.parametrize("epsilon", [0.1, 0.11, 0.37, 0.5, 1.0, 1.234, 2.9, 3.0])
@pytest.mark.parametrize("statistic", ["Moments", "LabelTables"])
def test_a_site_that_asks_for_less_pays_less(statistic: str, epsilon: float) -> None:
    study = Study.from_text(blind_text(KEYS, statistic=statistic))
    learner = build_for(study, epsilon)
    assert isinstance(learner, Statistic)
    (event,) = learner.planned(100)
    assert isinstance(event, SharedSum)
    most = build_for(study, 3.0).planned(100)[0]
    assert isinstance(most, SharedSum)
    assert (event.sigma, event.narrowest) == (most.sigma, most.narrowest)
    assert event.sensitivity == pytest.approx(learner.scale * learner.unit_reach())
    assert 0.85 * epsilon <= event.epsilon <= epsilon * (1 + 1e-12)
    assert event.alone.epsilon > event.epsilon


def test_the_total_is_the_scaled_sum_of_all_records_and_the_noise_that_is_stated(
    tmp_path: Path,
) -> None:
    """The law of the noise in the total: N shares, and nothing else, by a chi-square test."""
    wards = Wards(tmp_path)
    epsilons = [1.0, 3.0, 0.5, 2.0]
    files = [wards.mask(i, epsilon=epsilons[i]) for i in range(4)]
    opened = wards.open(files)
    words = unmask(
        [(MaskedFile.of(one.sealed), one.sealed.tensors["sum"]) for one in files],
        opened.batches[0][1],
        wards.rule,
        (wards.hub.public, wards.seal),
    )
    exact, variance = 0.0, 0.0
    for i, file in enumerate(files):
        learner = wards.study.build(epsilons[i])
        assert isinstance(learner, Statistic)
        learner.schema = wards.study.schema
        task, _ = plan_fit(learner, table(ROWS, seed=i), None)
        exact = exact + learner.scale * learner.exact_total(task) * learner.grain
        variance = variance + file.learner.noise_variance()
    first = files[0].learner
    assert variance == pytest.approx(4 / 2 * np.square(first.events_[0].sigma / first.weights()))
    found = (first.behind(words).values - exact) / np.sqrt(variance)
    # 20 numbers: the chance of a false alarm is below 1e-6.
    assert stats.chi2.ppf(3e-7, len(found)) < (found**2).sum() < stats.chi2.isf(3e-7, len(found))
    scales = [wards.study.build(each).scale for each in epsilons]  # type: ignore[attr-defined]
    total = [file.learner.behind(words) for file in files]
    assert sum(each.size for each in total) == pytest.approx(ROWS * sum(scales))
    assert sum(each.squares for each in total) == pytest.approx(ROWS * sum(a * a for a in scales))


def test_a_file_states_both_guarantees_and_cannot_be_used_alone(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    file = wards.mask(0)
    assert file.is_masked
    assert file.alone is not None
    assert file.guarantee.epsilon <= 1.0 < file.alone.epsilon
    assert file.guarantee.assumptions == (file.events[0].assumption,)
    assert "at least 2 of the sites" in file.guarantee.assumptions[0]
    with pytest.raises(SettingsError, match="masked"):
        file.learner.predict(wards.study.schema.encode(table(3, seed=1)).X)
    with pytest.raises(SettingsError, match="no fitted statistic"):
        wards.study.build_aggregator().combine([file, wards.mask(1)])


def test_the_ledger_charges_what_holds_if_all_others_collude(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    file = wards.mask(0)
    (charge,) = wards.ledger(0).charges()
    assert file.alone is not None
    assert charge.epsilon == pytest.approx(file.alone.epsilon)
    assert charge.events == file.paid_events == alone(file.events)


def test_an_accepted_keyholder_is_charged_less_and_the_rest_has_an_account(
    tmp_path: Path,
) -> None:
    wards = Wards(tmp_path)
    ledger = wards.ledger(0)
    ledger.allow("ward, all others colluding", Budget(epsilon=3.0, delta=1e-4))
    file = wards.mask(0, alone="ward, all others colluding")
    (charge,) = ledger.charges("ward")
    (other,) = ledger.charges("ward, all others colluding")
    assert file.alone is not None
    assert (charge.epsilon, other.epsilon) == (
        pytest.approx(file.guarantee.epsilon),
        pytest.approx(file.alone.epsilon),
    )
    assert file.paid_events == file.events
    wards.mask(0, sequence=2, alone="ward, all others colluding")
    with pytest.raises(BudgetExceeded):
        wards.mask(0, sequence=3, alone="ward, all others colluding")
    n_charged = len(ledger.charges("ward, all others colluding"))
    assert len(ledger.charges("ward")) == n_charged


def test_a_retry_returns_the_same_bytes_and_nothing_else_is_on_the_disk(tmp_path: Path) -> None:
    wards = Wards(tmp_path, n_keyholders=1)
    content = wards.mask_bytes(0, key="once")
    assert wards.mask_bytes(0, key="once") == content
    first = Contribution.load(content)
    assert len(wards.ledger(0).charges()) == 1
    described = MaskedFile.of(first.sealed)
    opened = wards.open([first, wards.mask(1), wards.mask(2)])
    pads = [described.pad(wards.hub.public, wards.seal)]
    seal = SealKey.load(next((wards.keyholders[0].folder / "seals").iterdir()))
    pads.append(described.pad(wards.keyholders[0].key.public, seal))
    words = subtract_words(first.sealed.tensors["sum"], add_words(pads, len(pads[0])))
    seeds = [described.open_seed(wards.keyholders[0].key.public, seal)]
    seeds.append(described.open_seed(wards.hub.public, wards.seal))
    content = b"".join(path.read_bytes() for path in tmp_path.glob("0.sqlite*"))
    assert first.sealed.tensors["sum"].tobytes() in content
    for secret in (words.tobytes(), *(pad.tobytes() for pad in pads), *seeds):
        assert secret[:32] not in content
        assert secret[:32].hex().encode() not in content
    assert opened.files[0].digest == first.digest


def test_a_site_can_choose_the_least_epsilon_of_a_study(tmp_path: Path) -> None:
    """Its records are scaled by whole parts, rounded down, so that it pays a little less."""
    wards = Wards(tmp_path)
    release = wards.release([wards.mask(0, epsilon=0.1), *(wards.mask(i) for i in range(1, 4))])
    least = check_release(wards.study, release).sources[0].guarantee.epsilon
    assert 0.09 < least < 0.0999
    low = build_for(wards.study, 0.1)
    assert least == pytest.approx(low.cost(ROWS), rel=1e-9)


def test_noise_alone_fills_a_batch_and_costs_nothing(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    files = [wards.mask(0), wards.mask(1), wards.mask(2, epsilon=None)]
    assert not files[2].has_records
    assert wards.ledger(2).charges() == []
    assert files[2].sealed.facts["size"] is None
    release = wards.release(files)
    check_release(wards.study, release)
    weights = [row["weight"] for row in release.sealed.facts["sources"]]
    assert weights == pytest.approx([0.5, 0.5, 0.0])
    assert [source.guarantee.epsilon for source in release.sources][2] == 0.0
    with pytest.raises(SettingsError, match="noise only"):
        wards.release([wards.mask(i, epsilon=None, sequence=2) for i in range(3)])


def test_a_release_is_made_of_opened_batches_only(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    files = [wards.mask(i) for i in range(4)]
    opened = wards.open(files[:3])
    for given, batches in ((files, opened), (files[:3], None), (files[1:], opened)):
        with pytest.raises(SettingsError, match="whole batches"):
            wards.study.combine(given, publication=Publication(wards.hub, opened=batches))
    other = Opened(opened.batches, SealKey.generate())
    with pytest.raises(ContributionRejected, match="not sealed for it"):
        wards.study.combine(files[:3], publication=Publication(wards.hub, opened=other))


def test_two_batches_add_up(tmp_path: Path) -> None:
    wards = Wards(tmp_path, n=6)
    files = [wards.mask(i) for i in range(6)]
    first, second = wards.open(files[:3]), wards.open(files[3:])
    opened = Opened([*first.batches, *second.batches], wards.seal)
    release = wards.study.combine(files, publication=Publication(wards.hub, opened=opened))
    assert len(release.sources) == 6
    check_release(wards.study, release)


def test_the_door_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Whatever a site signs: other noise, another rule, fewer sites than a batch, a false claim."""
    wards = Wards(tmp_path)
    file = wards.mask(0)
    facts = {k: v for k, v in file.sealed.facts.items() if k not in ("key", "tensors")}
    blind, share = facts["blind"], facts["share"]
    weaker = {**share["alone"], "epsilon": share["alone"]["epsilon"] / 2}
    n_words = len(file.sealed.tensors["sum"])
    event = replace(file.events[0], sigma=2 * file.events[0].sigma)
    lies: list[tuple[dict[str, Any], str]] = [
        ({"blind": {**blind, "shares": 3}}, "events are not the ones"),
        ({"blind": {**blind, "spare": 2}}, "share of the noise is not"),
        ({"blind": {**blind, "counted": []}}, "counts on fewer sites"),
        ({"blind": {**blind, "seeds": dict(list(blind["seeds"].items())[:2])}}, "seeds are not"),
        ({"blind": {**blind, "only_noise": True}}, "size"),
        ({"share": {**share, "epsilon": 2.0}}, "events are not the ones"),
        ({"share": {**share, "epsilon": 3}}, "shared in another way"),  # not 3.0: cannot be added
        ({"share": {**share, "steps": 128}}, "events are not the ones"),
        ({"share": {**share, "alone": weaker}}, "alone is not what"),
        ({"share": {**share, "more": 1}}, "alone is not what"),
        ({"events": events_to_json([event])}, "events are not the ones"),
        ({"size": None}, "size"),
        ({"size": file.learner._most_records + 1}, "size"),  # the total of its batch might not fit
        ({"receipt": None}, "no ledger was charged"),
    ]
    for changed, problem in lies:
        sealed = Sealed.seal("contribution", facts | changed, file.sealed.tensors, wards.keys[0])
        with pytest.raises(ContributionRejected, match=problem):
            wards.study.accept(Contribution.load(sealed.to_bytes()))
    for missing in ("blind", "share"):
        fewer = {name: value for name, value in facts.items() if name != missing}
        sealed = Sealed.seal("contribution", fewer, file.sealed.tensors, wards.keys[0])
        with pytest.raises(ContributionRejected):
            wards.study.accept(Contribution.load(sealed.to_bytes()))
    for words in (np.zeros(n_words - 1, np.int64), np.zeros(n_words)):
        sealed = Sealed.seal("contribution", facts, {"sum": words}, wards.keys[0])
        with pytest.raises(ContributionRejected):
            wards.study.accept(Contribution.load(sealed.to_bytes()))


def test_a_share_in_the_clear_promises_what_it_hides_alone(tmp_path: Path) -> None:
    study = Study.from_text(blind_text(KEYS))
    learner = study.build(1.0)
    learner.schema = study.schema
    learner.fit(table(ROWS, seed=1))
    assert learner.guarantee_.epsilon > 1.4
    assert not learner.guarantee_.assumptions
    with pytest.raises(SettingsError, match="mask_sum"):
        study.train(table(ROWS, seed=1), None, epsilon=1.0, **SENDER)


def test_a_retry_that_signs_anew_is_refused_by_keyholders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin draws, masks and signs again under the same charge: two files of one number.

    Their difference would be that of two draws of noise, and tell more than was paid for.
    """
    wards = Wards(tmp_path)
    first = wards.mask(0, key="once")
    monkeypatch.setattr(Ledger, "sealed", lambda *_: None)
    monkeypatch.setattr(Ledger, "seal", lambda *_: None)
    monkeypatch.setattr(Ledger, "charge", lambda *_, **__: wards.ledger(0).charges()[0])
    again = wards.mask(0, key="once")
    assert again.digest != first.digest
    wards.keyholders[0].acknowledge(MaskedFile.of(first.sealed))
    with pytest.raises(ContributionRejected, match="its number"):
        wards.keyholders[0].acknowledge(MaskedFile.of(again.sealed))


def test_without_the_pad_of_one_holder_nothing_is_seen(tmp_path: Path) -> None:
    """What the hub has less all pads but one keyholder's is uniform: far from every sum."""
    wards = Wards(tmp_path)
    file = wards.mask(0)
    described = MaskedFile.of(file.sealed)
    seal = SealKey.load(next((wards.keyholders[0].folder / "seals").iterdir()))
    pads = [
        described.pad(wards.hub.public, wards.seal),
        described.pad(wards.keyholders[0].key.public, seal),
    ]
    left = subtract_words(file.sealed.tensors["sum"], add_words(pads, len(pads[0])))
    learner = file.learner
    far = float(np.median(np.abs(left.astype(float)))) * learner.step
    assert far > 100 * ROWS  # of uniform words it is millions, and a sum is ROWS at most
