"""What a recipe says never becomes a shell's words: 30 hostile texts in every place."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.processes import HANG_S
from toolkit.errors import DmtError
from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.base import Job, starter
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import (
    ClusterSection,
    KubernetesSection,
    LaunchSection,
    Recipe,
    SlurmSection,
)

HOSTILE = (
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "& touch canary",
    "&& touch canary #",
    "| touch canary",
    "|| touch canary",
    "> canary",
    ">> canary",
    "< /dev/null > canary",
    "\ntouch canary\n",
    "\r\ntouch canary",
    "a'; touch canary; '",
    'a"; touch canary; "',
    "a'$(touch canary)'b",
    'a"$(touch canary)"b',
    "${x:-$(touch canary)}",
    "$((1)) $(touch canary)",
    "\\$(touch canary)",
    "\\\n touch canary",
    "{touch,canary}",
    "!touch canary",
    "-x --output=canary",
    "--wrap=touch canary",
    "\t touch canary",
    "#SBATCH --wrap=touch",
    "a\n#SBATCH --wrap=touch canary",
    "EOF\ntouch canary\nEOF",
    "*; touch canary",
    "~$(touch canary)~",
)
RECIPE = Path("recipes/tiny/llama-bytes.yaml")

STUB = '#!/bin/bash\nprintf "%s\\0" "$@" > "$STUBS/$(basename "$0").argv"\n'


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run scripts in, with stand-ins for Slurm's programs."""
    folder = tmp_path / "shell"
    (folder / "bin").mkdir(parents=True)
    for name in ("srun", "scontrol"):
        stub = folder / "bin" / name
        stub.write_text(STUB)
        stub.chmod(0o755)
    monkeypatch.setenv("STUBS", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return folder


def hostile_recipe(text: str) -> Recipe:
    """Every free text of a recipe that a launcher or its files may carry."""
    recipe = load_recipe(RECIPE)
    logging = recipe.logging.model_copy(update={"project": text})
    model = recipe.model.model_copy(update={"hub": text})
    slurm = SlurmSection(options=("--cpus-per-task=1&(touch|canary)*",))
    pods = KubernetesSection(image=text, volume_claim="x")
    launch = LaunchSection(slurm=slurm, kubernetes=pods)
    update = {"logging": logging, "model": model, "launch": launch}
    return recipe.model_copy(update=update)


def jobs(text: str, folder: Path) -> Iterator[Job]:
    recipe = hostile_recipe(text)
    launch = recipe.launch.model_copy(update={"rendezvous": "h:1"})
    written = dump_recipe(recipe)
    for name, nodes in ((text, 1), (text, 2), ("plain", 2)):
        cluster = ClusterSection(nodes=nodes)
        yield Job(folder / name, cluster, launch, name=recipe.name, recipe=written)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_reaches_a_shell(text: str, shell: Path, tmp_path: Path) -> None:
    ran = 0
    for name in LAUNCHERS:
        for job in jobs(text, tmp_path / "runs"):
            try:
                spec = starter(name).spec(job)
            except DmtError:
                continue  # Refused with a message is as good.
            for path, content in spec.files.items():
                if path.name == "job.yaml":
                    assert_is_data(content, text, job)
                if path.suffix == ".sbatch":
                    ran += run_script(content, shell, job)
            # What a dry run prints is for a shell, too.
            if name != "ray":
                command = spec.printable().split("\n\n#")[0]
                replaced = command.replace(spec.argv[0], "true", 1)
                subprocess.run(["bash", "-c", replaced], cwd=shell, timeout=HANG_S, check=False)
    assert ran, "Slurm's script was run"
    assert not list(tmp_path.rglob("canary"))


def assert_is_data(manifest: str, image: str, job: Job) -> None:
    recipe, *_, made = YAML(typ="safe").load_all(manifest)
    assert recipe["data"]["recipe.yaml"].split() == job.recipe.split()
    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == image


def run_script(script: str, shell: Path, job: Job) -> int:
    """Run a batch script; its `srun` must have got the run directory as one word."""
    head, _, body = script.partition("\n\n")
    assert all(line.startswith("#") for line in head.splitlines()), "directives only"
    assert "#SBATCH" not in body.replace(job.run_dir.name, ""), "none added"
    subprocess.run(["bash", "-c", body], cwd=shell, timeout=HANG_S, check=False)
    words = (shell / "srun.argv").read_text().split("\0")
    assert words[words.index("--run-dir") + 1] == str(job.run_dir)
    return 1


@pytest.mark.parametrize("key", ["name", "launch.rendezvous", "launch.kubernetes.volume_claim"])
def test_names_are_refused_at_check(key: str) -> None:
    for text in HOSTILE:
        quoted = '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
        with pytest.raises(DmtError, match=key.replace(".", r"\.")):
            load_recipe(RECIPE, [f"{key}={quoted}"])


def test_slurm_options_are_options() -> None:
    for text in HOSTILE:
        with pytest.raises(DmtError, match=r"launch\.slurm\.options"):
            load_recipe(RECIPE, [f"launch.slurm.options={['--comment=' + text]!r}"])
