"""How a site changes its key, here and at every hub that knows it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from consilience.errors import ConsilienceError, SettingsError
from consilience.files.sealed import SigningKey
from consilience.site.blind import BlindSite
from consilience.site.client import FOLDER, HubClient


class SiteKeys(BlindSite):
    """What a site does with its key."""

    def rotate_key(self, *, anyway: bool = False) -> str:
        """Replace the site's key here, and at every hub that knows it; return the new one.

        No hub can stop that for the others: one that does not take the new key is asked again
        whenever the site works with it, and until then `outdated` names its studies. A contribution
        that was not submitted would be lost, and is a reason to refuse, unless `anyway`.
        """
        with self._working():
            self._change_key(anyway=anyway)
            for name in self.outdated:
                with suppress(ConsilienceError):
                    self._hand_over_key(name)
            return self.key.public

    @property
    def outdated(self) -> list[str]:
        """Names of the studies whose hub has not taken the site's present key yet."""
        return [name for name in self.studies if self._joined(name).key is not None]

    def _change_key(self, *, anyway: bool = True) -> None:
        """Replace the key here, after noting which one each hub knows."""
        old, new_path = self.key, self.folder / "key.new.pem"
        if not (new_path.exists() or anyway):
            self._check_submitted()
        SigningKey.at(new_path)
        kept = self._key_file(old.public)
        if not kept.exists():
            os.link(self.folder / "key.pem", kept)
        for name in self.studies:
            joined = self._joined(name)
            if joined.key is None and not joined.hub.startswith(FOLDER):
                self._write_joined(name, replace(joined, key=old.public))
        new_path.replace(self.folder / "key.pem")  # at every moment there is a key

    def _key_file(self, public: str) -> Path:
        return self.folder / f"key.{public[:16]}.pem"

    def _check_submitted(self) -> None:
        """Refuse to lose contributions that were paid for: the old key signed them."""
        for name in self.studies:
            submitted = self._joined(name).submitted or 0
            if self._newest_number(name, key=self.key.public) > submitted:
                raise SettingsError(
                    f"A contribution to {name!r} is signed with the present key and was not "
                    "submitted. Nothing was changed. Submit it first (consilience site submit "
                    f"{name}); if its hub does not take it, give it up with --anyway."
                )

    def _complete_rotation(self, name: str) -> None:
        """Finish a rotation that was interrupted, as far as it concerns one study."""
        if (self.folder / "key.new.pem").exists():
            self._change_key()
        self._hand_over_key(name)

    def _hand_over_key(self, name: str) -> None:
        """Make a study's hub accept the present key, if it knows an earlier one.

        Whether it took one that was handed over before is not known if its answer was lost.
        """
        joined = self._joined(name)
        if joined.key is None:
            return
        first = self._key_file(joined.key)
        others = sorted(path for path in self.folder.glob("key.*.pem") if path != first)
        refusal = None
        for path in (first, *others):
            hub = self._hub(joined, SigningKey.load(path))
            assert isinstance(hub, HubClient)
            try:
                hub.rotate_key(name, self.key)
            except SettingsError as refused:
                refusal = refusal or refused
            else:
                self._write_joined(name, replace(joined, key=None))
                return
        assert refusal is not None
        raise refusal
