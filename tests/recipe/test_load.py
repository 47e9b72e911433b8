"""Loading: extends, overrides, paths, file errors, secrets, several mistakes at once."""

import json
import os
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.recipe.good import GOOD
from toolkit.errors import Problem, RecipeError
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.recipe import yaml_text
from toolkit.recipe.schema import HfSource, TextSource


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def mistakes(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path, "good.yaml", GOOD)


@pytest.mark.usefixtures("good")
class TestExtends:
    def test_maps_merge_and_values_replace(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            "sub/top.yaml",
            "extends: ../good.yaml\nname: top\n"
            "training: {steps: 70}\noptimizer: {betas: [0, 0]}\n",
        )
        recipe = load_recipe(path)
        assert (recipe.name, recipe.training.steps, recipe.optimizer.betas) == (
            "top",
            70,
            (0, 0),
        )
        assert recipe.training.sequence_length == 64

    def test_another_kind_replaces_the_source(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, "top.yaml", "extends: good.yaml\ndata: {train: {kind: hf, path: a/b}}\n"
        )
        assert load_recipe(path).data.train == HfSource(kind="hf", path="a/b")
        same = write(tmp_path, "same.yaml", "extends: good.yaml\ndata: {train: {label: a}}\n")
        source = load_recipe(same).data.train
        assert isinstance(source, TextSource)
        assert source.files == ("{stdlib}/*.py",)

    def test_another_model_type_replaces_the_config(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            "top.yaml",
            "extends: good.yaml\nmodel: {config: {model_type: gpt2, n_embd: 64, n_head: 4}}\n",
        )
        config = load_recipe(path).model.config
        assert config == {"model_type": "gpt2", "n_embd": 64, "n_head": 4}

    def test_of_several_files_a_later_one_is_on_top(self, tmp_path: Path) -> None:
        """What both of them extend is below both."""
        write(tmp_path, "a.yaml", "extends: good.yaml\nname: a\ntraining: {steps: 70}\n")
        write(tmp_path, "b.yaml", "extends: ./good.yaml\nname: b\n")
        top = write(tmp_path, "top.yaml", "extends: [a.yaml, b.yaml]\n")
        assert (load_recipe(top).name, load_recipe(top).training.steps) == ("b", 70)

    def test_blames_the_file_that_states_the_value(self, tmp_path: Path) -> None:
        base = write(tmp_path, "base.yaml", GOOD.replace("seed: 1", "seed: -1"))
        middle = write(tmp_path, "middle.yaml", "extends: base.yaml\nqqqqqq: 1\n")
        top = write(tmp_path, "top.yaml", "extends: middle.yaml\nname: a b\n")
        found = mistakes(top)
        assert [(p.file, p.key) for p in found] == [
            (str(top), "name"),
            (str(middle), "qqqqqq"),
            (str(base), "training.seed"),
        ]
        assert [p.line for p in found] == [2, 2, 1 + GOOD[: GOOD.index("seed: 1")].count("\n")]

    @pytest.mark.parametrize(
        ("files", "blamed", "said"),
        [
            (["extends: b.yaml", "name: b\nextends: a.yaml"], "b.yaml:2: extends", "a cycle"),
            (["name: a\nextends: goood.yaml"], "a.yaml:2: extends", "good.yaml"),
            (["extends: llama-bytes"], "a.yaml:1: extends", "`recipes:tiny/llama-bytes`"),
            (["extends: recipes:tiny/llama-byte"], "a.yaml:1: extends", "llama-bytes.yaml"),
            (["extends: [good.yaml, 1]"], "a.yaml:1: extends", "a file name, or a list of"),
            *(([f"extends: {name}"], "", "Is a directory") for name in (".", "/", "./")),
            (
                [
                    "extends: b.yaml\ndata: {train: [{weight: 1}]}",
                    "extends: good.yaml\ndata: {train: [{kind: txt}]}",
                ],
                "a.yaml:2: data.train[0].kind",
                "found nothing",
            ),
            # A mistake below two files is one.
            (
                ["extends: [b.yaml, c.yaml]", *["extends: d.yaml"] * 2, f"{GOOD}model: {{}}"],
                "d.yaml:",
                "already",
            ),
        ],
    )
    def test_one_problem(
        self, files: list[str], blamed: str, said: str, tmp_path: Path
    ) -> None:
        for name, text in zip("abcd", files, strict=False):
            write(tmp_path, f"{name}.yaml", f"{text}\n")
        (problem,) = mistakes(tmp_path / "a.yaml")
        assert blamed in str(problem) and said in str(problem), str(problem)

    def test_a_hub_id_is_for_init(self) -> None:
        (problem,) = mistakes(Path("Qwen/Qwen3-8B"))
        assert "dmt init Qwen/Qwen3-8B" in problem.fix


SIZE = Path("recipes/llama/llama-3.1-8b.yml").read_text(encoding="utf-8").split("tasks:")[0]


class TestSizes:
    @pytest.mark.parametrize(
        ("tasks", "key", "found"),
        [
            ("tasks: {lora: [1]}", "tasks.lora", "a list"),
            ("tasks:\n    lora: abc", "tasks.lora", "abc"),
            ("tasks: 3", "tasks", "3"),
            ("tasks: {lora: {name: a b}}", "name", "a b"),
            ("tasks: {l2: null}", "(file)", "no file"),
            ("tasks: {lora: {extends: x.yml}}", "tasks.lora", "a map"),
            ("tasks: {lora: null, no-base: {}}", "", ""),
            (b"\xff\xfe", "(file)", "bytes that are no UTF-8"),
        ],
    )
    def test_tasks(self, tmp_path: Path, tasks: str | bytes, key: str, found: str) -> None:
        """The size stands alone: what a task's recipes share is the shipped file."""
        text = f"{SIZE}{tasks}" if isinstance(tasks, str) else tasks
        size = write(tmp_path, "own/a-1.yml", text)
        recipe = size.with_name("a-1-lora.yaml")
        if not key:
            assert load_recipe(recipe, ["training.seed=3"]).name == "a-1-lora"
            (problem,) = mistakes(size.with_name("a-1-no-base.yaml"))
            assert "base/no-base.yml" in problem.found
            assert (problem.key, problem.file) == ("tasks.no-base", str(size))
            return
        (problem,) = mistakes(recipe, "training.seed=3")
        assert problem.key == key and found in problem.found
        assert problem.file == str(recipe if "no file" in found else size)
        assert "a-1-l2.yaml" in problem.fix or "no file" not in found

    def test_what_a_task_shares_is_beside_the_sizes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the working directory is the folder of the sizes."""
        write(tmp_path, "base/sft.yml", "checkpoint: {keep: 7}\n")
        size = write(tmp_path, "own/a-1.yml", f"{GOOD}tasks: {{sft: {{}}}}\n")
        monkeypatch.chdir(size.parent)
        assert load_recipe(Path("a-1-sft.yaml")).checkpoint.keep == 7

    def test_tasks_below_a_recipe(self, tmp_path: Path) -> None:
        size = write(tmp_path, "a.yml", f"{GOOD}tasks: {{lora: 1}}\n")
        (problem,) = mistakes(write(tmp_path, "top.yaml", "extends: a.yml\n"))
        assert (problem.key, problem.file) == ("tasks.lora", str(size))

    @pytest.mark.parametrize("ending", ["", ".yaml"])
    def test_below_a_recipe(self, tmp_path: Path, ending: str) -> None:
        named = f"extends: recipes:llama/llama-3.1-8b-lora{ending}\nname: mine\n"
        assert load_recipe(write(tmp_path, "top.yaml", named)).name == "mine"

    def test_a_size_is_no_run(self) -> None:
        (problem,) = mistakes(Path("recipes/qwen/qwen3-8b.yml"))
        assert problem.key == "tasks" and problem.line
        assert "recipes/qwen/qwen3-8b-lora.yaml" in problem.fix


class TestOverrides:
    def test_values_are_yaml(self, good: Path) -> None:
        recipe = load_recipe(
            good,
            [
                "training.steps=null",
                "training.tokens=1.0e6",
                "optimizer.betas=[0.5, 0.6]",
                "parallel.zero.stage=2",
                "parallel.zero.stage=3",
                "logging.trackers=[wandb]",
                "name=x-y",
            ],
        )
        assert recipe.training.tokens == 10**6
        assert recipe.optimizer.betas == (0.5, 0.6)
        assert recipe.parallel.zero.stage == 3
        assert recipe.logging.trackers == ("wandb",)

    def test_another_kind(self, good: Path) -> None:
        recipe = load_recipe(good, ["data.train.kind=hf", "data.train.path=org/data"])
        assert recipe.data.train == HfSource(kind="hf", path="org/data")

    @pytest.mark.parametrize(
        ("override", "key", "fix"),
        [
            ("training.stepz=3", "training.stepz", "did you mean `steps`?"),
            ("trainin.steps=3", "trainin", "did you mean `training`?"),
            ("training.steps=[", "training.steps", "fix the YAML"),
            ("training.steps='3'", "training.steps", "remove the quotes"),
            ("training.steps=!!python/name:os.system", "training.steps", "remove the tag"),
            ("nonsense", "--set", "e.g. --set"),
            ("=3", "--set", "e.g. --set"),
            ("a..b=3", "--set", "e.g. --set"),
            ("extends=b.yaml", "extends", "into the recipe file"),
            (
                "training.micro_batch_size=0",
                "training.micro_batch_size",
                "write an integer ≥ 1",
            ),
        ],
    )
    def test_mistakes_are_blamed_on_set(
        self, good: Path, override: str, key: str, fix: str
    ) -> None:
        (problem,) = mistakes(good, override)
        assert (problem.file, problem.line, problem.key) == ("--set", 0, key)
        assert fix in problem.fix


class TestPaths:
    @pytest.mark.parametrize(
        ("kind", "key"), [("text", "files"), ("hf", "path"), ("megatron", "prefix")]
    )
    def test_urls_are_left_as_they_are(self, tmp_path: Path, kind: str, key: str) -> None:
        url = "s3://bucket/web/part-*.jsonl"
        value = [url] if key == "files" else url
        path = write(tmp_path, "recipe.yaml", GOOD)
        train = json.dumps({"kind": kind, key: value})
        source = load_recipe(path, [f"data.train={train}"]).data.sources[0]
        assert source.places == (url,)

    def test_relative_to_the_file_that_states_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = GOOD.replace('"{stdlib}/*.py"', '"{stdlib}/*.py", "texts/*.txt", /abs/x.txt')
        base = base.replace("tokenizer: bytes", "tokenizer: tok")
        write(tmp_path, "base/base.yaml", base.replace("stage: auto", "config: my.json"))
        (tmp_path / "base/tok").mkdir()
        top = write(
            tmp_path,
            "top/top.yaml",
            "extends: ../base/base.yaml\n"
            "parallel: {zero: {nvme_path: nvme, offload_optimizer: nvme}}\n"
            "data: {validation_fraction: 0.0, validation: {kind: hf, path: 'v/*.parquet'}}\n",
        )
        monkeypatch.chdir(tmp_path)
        recipe = load_recipe(Path("top/top.yaml"), ["model.hub=./weights"])
        source, validation = recipe.data.train, recipe.data.validation
        assert isinstance(source, TextSource)
        assert isinstance(validation, HfSource)
        folder = f"{tmp_path}/top/../base"
        assert source.files == ("{stdlib}/*.py", f"{folder}/texts/*.txt", "/abs/x.txt")
        assert validation.path == f"{tmp_path}/top/v/*.parquet"
        assert recipe.data.tokenizer == f"{folder}/tok"
        assert recipe.parallel.zero.config == f"{folder}/my.json"
        assert recipe.parallel.zero.nvme_path == f"{tmp_path}/top/nvme"
        assert recipe.model.hub == f"{tmp_path}/weights"
        assert recipe == load_recipe(top, [f"model.hub={tmp_path}/weights"])

    @pytest.mark.parametrize(
        "setting",
        [
            "data.tokenizer=bytes",
            "data.tokenizer=meta-llama/Llama-3.1-8B",
            "model.hub=gpt2",
            "parallel.zero.config=zero2",
            "data.train={kind: hf, path: allenai/c4}",
        ],
    )
    def test_ids_and_presets_stay(
        self, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
    ) -> None:
        (tmp_path / "bytes").mkdir()
        (tmp_path / "zero2").mkdir()
        monkeypatch.chdir(tmp_path)
        assert str(tmp_path) not in load_recipe(good, [setting]).model_dump_json()

    @pytest.mark.parametrize(
        "setting", ["data.tokenizer=chatml", "model.hub=chatml", "data.chat_template=bytes"]
    )
    def test_words_of_another_setting_are_paths(
        self, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        key, _, name = setting.partition("=")
        (tmp_path / name).mkdir()
        stated = read_layers(good, [setting]).merged.at(tuple(key.split(".")))
        assert stated == str(tmp_path / name)

    def test_home(self, good: Path) -> None:
        recipe = load_recipe(good, ["data.tokenizer=~/t"])
        assert recipe.data.tokenizer == str(Path.home() / "t")

    def test_strange_paths_do_not_raise(self, good: Path) -> None:
        load_recipe(good, ["model.hub=~no-such-user/c", "data.tokenizer=" + "x" * 4000])


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "found"),
        [
            ("", "an empty file"),
            ("# only a comment\n", "an empty file"),
            ("- a\n", "a list"),
            ("just text\n", "just text"),
            (b"\xff\xfe\x00\x01", "no UTF-8"),
            (b"name: a\nmodel: \xe9\n", "no UTF-8"),
            (b"\x7fELF\x00\x00\x00\x80", "no UTF-8"),
            ("x: 1\n" * 100_000, "has 500000 bytes, more than 262144 bytes"),
            ("a: " + "[" * 1000, "nesting deeper"),
            ("a: [" + "1," * 30_000 + "]", "more than 20000 values"),
            ("a: &a [x, x]\n" + "\n".join(
                f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]"
                for i in range(9)
            ), "more than 20000 values"),
            ("a: &a [*a]\n", "the alias `*a`"),
        ],
    )  # fmt: skip
    def test_one_clear_problem(self, tmp_path: Path, content: str | bytes, found: str) -> None:
        path = write(tmp_path, "a.yaml", content)
        (problem,) = mistakes(path)
        assert found in problem.found
        assert problem.file == str(path)
        assert problem.fix and (problem.line == 2 or b"\xe9" not in path.read_bytes())

    def test_missing_folder_and_device(self, tmp_path: Path) -> None:
        (missing,) = mistakes(tmp_path / "good.yml")
        assert "no file" in missing.found
        (folder,) = mistakes(tmp_path)
        assert "Is a directory" in folder.found and folder.fix == "name a recipe in it"
        os.mkfifo(tmp_path / "pipe")  # reading it would wait indefinitely
        for special in (Path("/dev/zero"), tmp_path / "pipe"):
            (device,) = mistakes(special)
            assert "no regular file" in device.found

    def test_byte_order_mark_and_windows_lines(self, tmp_path: Path) -> None:
        text = GOOD.replace("\n", "\r\n")
        assert load_recipe(write(tmp_path, "a.yaml", "\ufeff" + text)).name == "good"

    def test_json_with_tabs(self, tmp_path: Path) -> None:
        values = YAML(typ="safe", pure=True).load(GOOD)
        path = write(tmp_path, "a.json", json.dumps(values, indent="\t"))
        assert load_recipe(path).name == "good"

    def test_yaml_1_2_numbers(self, good: Path) -> None:
        recipe = load_recipe(good, ["training.seed=0x1F", "optimizer.eps=1e-9"])
        assert (recipe.training.seed, recipe.optimizer.eps) == (31, 1e-9)
        assert yaml_text.resolve_plain("0o17") == 15
        assert yaml_text.resolve_plain("017") == 17
        assert yaml_text.resolve_plain("1:30") == "1:30"
        assert yaml_text.resolve_plain("2026-01-01") == "2026-01-01"


class TestSeveral:
    def test_settings_come_before_rules(self, tmp_path: Path) -> None:
        """Every wrong setting first, what disagrees with another setting then."""
        rules = GOOD.replace("warmup_steps: 10", "warmup_steps: 10\n  decay_steps: 5")
        rules = rules.replace("precision: fp32", "precision: fp16")
        wrong = rules.replace("seed: 1", "sede: 1").replace("kind: text", "kind: txt")
        found = mistakes(write(tmp_path, "a.yaml", wrong))
        assert [p.key for p in found] == ["data.train.kind", "training.sede"]
        found = mistakes(write(tmp_path, "a.yaml", rules))
        assert [p.key for p in found] == ["training.precision", "schedule.decay_steps"]

    def test_all_at_once_in_file_order(self, tmp_path: Path) -> None:
        """None of rules on wrong settings, as of the warm-up and the steps."""
        text = GOOD
        for old, new in (
            ("name: good", "name: '!'"),
            ("hidden_size: 64", "hidden_size: 0"),
            ("steps: 100", "steps: 0"),
            ("precision: fp32", "precision: fp16"),
            ("gpu: cpu", "gpu: toaster\n  tpu: 1"),
        ):
            text = text.replace(old, new)
        found = mistakes(write(tmp_path, "a.yaml", text))
        assert [p.line for p in found] == sorted(p.line for p in found)
        assert {p.key for p in found} == {"name", "training.steps", "cluster.tpu"}


class TestSecrets:
    def test_value_of_an_environment_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_SERVICE_TOKEN", "canary-value-1")
        text = GOOD.replace("name: good", "name: canary-value-1")
        text = text.replace("tokenizer: bytes", "canary-value-1: canary-value-1")
        path = write(tmp_path, "a.yaml", text)
        with pytest.raises(RecipeError) as caught:
            load_recipe(path, ["training.seed=canary-value-1", "canary-value-1"])
        assert "canary-value-1" not in str(caught.value) + repr(caught.value.problems)
        assert {p.key for p in caught.value.problems} >= {"name", "training.seed"}

    def test_never_echoed_in_a_syntax_error(self, tmp_path: Path) -> None:
        token = "hf_" + "Ab1" * 11
        for text in (f"a: *{token}\n", f"a: &{token} *b\n", f"- {token}\n", f"{token}\n"):
            with pytest.raises(RecipeError) as caught:
                load_recipe(write(tmp_path, "a.yaml", text))
            assert token not in str(caught.value)

    def test_in_an_extended_file(self, tmp_path: Path) -> None:
        base = write(tmp_path, "b.yaml", GOOD.replace("bytes", "hf_" + "Ab1" * 11))
        top = write(tmp_path, "a.yaml", "extends: b.yaml\ndata: {tokenizer: bytes}\n")
        (problem,) = mistakes(top)
        assert (problem.file, problem.found) == (str(base), "***")

    def test_revisions_are_no_secrets(self, good: Path) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        recipe = load_recipe(good, [f"data.tokenizer_revision={commit}"])
        assert recipe.data.tokenizer_revision == commit
