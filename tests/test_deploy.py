"""The files in deploy/: equal to what the documentation prints, and naming only what there is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from consilience.cli.app import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def environment_names():
    """Return every name that `hub serve` reads from the environment."""
    serve = get_command(app).commands["hub"].commands["serve"]
    return {parameter.envvar for parameter in serve.params if parameter.envvar}


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.mark.parametrize("name", ["nginx.conf", "consilience-hub.service"])
def test_a_file_is_what_the_page_prints(name):
    assert f"\n{(DEPLOY / name).read_text()}```" in PAGE


def test_the_composition_names_files_that_exist_and_settings_that_are_documented():
    stated = compose()
    for name, service in stated["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            inside = source.startswith("./")
            assert (DEPLOY / source).is_file() if inside else source in stated["volumes"], source
        for secret in service["secrets"]:
            assert (secret if isinstance(secret, str) else secret["source"]) in stated["secrets"]
        shared = service.get("network_mode") == "service:gate"
        assert shared == (name != "gate")
        assert ("ports" in service) == (name == "gate")
    hub = stated["services"]["hub"]
    assert (DEPLOY / hub["build"]["context"] / hub["build"]["dockerfile"]).is_file()
    own = {each for each in hub["environment"] if each.startswith("CONSILIENCE_")}
    assert own <= environment_names()
    assert "/var/lib/consilience" in hub["volumes"][0]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/secrets/" in ignored
    for secret in stated["secrets"].values():
        assert secret["file"].startswith("secrets/")
        assert (
            Path(secret["file"]).name in (DEPLOY / "compose.yaml").read_text().split("services:")[0]
        )


def test_nginx_reads_the_secrets_where_the_composition_puts_them():
    text = (DEPLOY / "nginx.conf").read_text()
    named = set(re.findall(r"ssl_certificate(?:_key)?\s+(\S+);", text))
    assert named == {each["target"] for each in compose()["services"]["gate"]["secrets"]}


def test_the_image_copies_files_that_exist_and_runs_as_nobody_special():
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert "USER 10001:10001" in text
    assert text.count("--require-hashes") == 2
    for name in re.findall(r"\b(CONSILIENCE_\w+)=", text):
        assert name in environment_names()


def test_the_image_passes_hadolint():
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not in this environment")
    done = subprocess.run(
        [program, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["consilience-hub.service", "consilience-keyholder.service"])
def test_systemd_accepts_a_service(name, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    program = str(Path(sys.executable).with_name("consilience"))
    text = (DEPLOY / name).read_text().replace("/opt/consilience/bin/consilience", program)
    assert program in text
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr
