"""The commands `consilience contribution …`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

import consilience as cs
from consilience.cli.command import Answer, Commands
from consilience.cli.options import FilePath, Html

commands = Commands("Read and check the file that a site submits.")


@commands.add("show", "contribution show contribution-0001.safetensors")
def show(file: FilePath, html: Html = None) -> Answer:
    """Print a contribution's certificate."""
    from consilience.files.certificate import of_contribution

    contribution = cs.Contribution.load(file, trusted=True)
    page = of_contribution(contribution)
    if html is not None:
        html.write_text(page.as_html(), encoding="utf-8")
    facts = {**contribution.sealed.facts, "digest": contribution.digest}
    return Answer(facts, page.as_text())


@commands.add("verify", "contribution verify contribution-0001.safetensors")
def verify(
    file: FilePath,
    key: Annotated[
        str | None,
        Option(help="The site's public key. Without it, any key is accepted and printed."),
    ] = None,
) -> Answer:
    """Check signature, digests and guarantee offline; the exit code is 0 only if all are valid."""
    contribution = cs.Contribution.load(file, trusted=True).verify(key=key)
    facts = {
        "holds": True,
        "site": contribution.site,
        "key": contribution.sealed.key,
        "digest": contribution.digest,
        "guarantee": contribution.guarantee.as_dict(),
    }
    text = (
        f"Valid: {contribution.guarantee!r}, signed by {contribution.site!r} with key "
        f"{contribution.sealed.key}"
    )
    return Answer(facts, text)
