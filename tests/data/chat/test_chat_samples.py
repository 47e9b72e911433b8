"""From files with conversations to rows of micro batches, through the cache."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.building import built
from tests.data.chat.families import CHATML, TEMPLATES, conversations, make_tokenizer
from toolkit.batch import IGNORE_INDEX
from toolkit.data.build import TrainingData
from toolkit.data.chat import maker, workers
from toolkit.data.chat.report import ChatReport
from toolkit.data.packing import StreamSamples
from toolkit.errors import DataError

Row = dict[str, Any]


def chat(question: str, *answers: str) -> Row:
    turns = []
    for answer in answers:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return {"messages": turns}


def write(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(base: Path, train: Row | None = None, length: int = 128, **data: Any) -> TrainingData:
    """Data of `rows.jsonl`, tokenised by bytes with the shipped template."""
    source = {"kind": "chat", "path": "rows.jsonl", **(train or {})}
    section = {"train": source, "chat_template": "chatml", **data}
    return built(base, section, length, vocab_size=None)


def samples_of(data: TrainingData) -> StreamSamples:
    return data.sources[0].train


def report_of(data: TrainingData) -> ChatReport:
    report = data.sources[0].report
    assert report is not None
    return report


def texts(samples: StreamSamples, *, trained: bool = False) -> list[str]:
    """Every conversation, or what is trained of it; `$` is the end of text."""
    found = []
    for index in range(len(samples)):
        for one in samples.documents(index):
            ids = one.ids[one.trained] if trained else one.ids
            found.append(bytes(36 if i == 256 else i for i in ids).decode())
    return found


def said(question: str, answer: str, end: str = "$") -> str:
    asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return f"{asked}{answer}<|im_end|>\n{end}"


def test_one_conversation_a_row(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), chat("a", "b", "c")])
    samples = samples_of(build(tmp_path))
    assert texts(samples) == [said("Hi", "Hello"), said("a", "b", "") + said("a", "c")]
    assert texts(samples, trained=True) == ["Hello<|im_end|>\n$", "b<|im_end|>\nc<|im_end|>\n$"]
    (row,) = samples.rows(0)
    assert row.segments is None and row.positions is None
    n = len(said("Hi", "Hello"))
    labels = row.labels[row.labels != IGNORE_INDEX]
    assert bytes(labels[:-1].tolist()) == b"Hello<|im_end|>\n" and labels[-1] == 256
    assert (row.labels[n - 1 :] == IGNORE_INDEX).all() and row.labels[n - 2] == 256
    assert (row.input_ids[1:n] == np.append(samples.documents(0)[0].ids[1:], [])).all()


def test_completion_needs_a_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "rows.jsonl", [chat("a", "b")])
    with pytest.raises(DataError, match="separates prompt and completion"):
        build(tmp_path, {"loss_on": "completion"})
    write(tmp_path / "rows.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    plain = build(tmp_path, {"loss_on": "completion"}, chat_template=None)
    assert texts(samples_of(plain), trained=True) == ["4$"]
    assert not caplog.records
    build(tmp_path)
    assert "`data.chat_template` is not used for 1 rows: prompt and completion" in caplog.text


def test_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "rows.jsonl", [chat("Hi", "x" * 200), chat("Hi", "short")])
    for choice, n_samples in (("truncate", 2), ("drop", 1), ("split", 4)):
        with caplog.at_level(logging.WARNING):
            data = build(tmp_path, {"too_long": choice}, 100)
        report = report_of(data)
        assert (report.rows, report.too_long, len(data.train)) == (2, 1, n_samples)
        assert f"1 too long and {choice.rstrip('e')}" in caplog.text
    whole = said("Hi", "x" * 200)
    assert texts(samples_of(build(tmp_path, length=100)))[0] == whole[:100]
    pieces = samples_of(build(tmp_path, {"too_long": "split"}, 100))
    # Every token is trained once: a piece begins with the last token of the one before.
    assert texts(pieces)[0] + "".join(text[1:] for text in texts(pieces)[1:3]) == whole
    labels = [label for i in range(3) for label in pieces.rows(i)[0].labels.tolist()]
    assert sum(label != IGNORE_INDEX for label in labels) == 200 + len("<|im_end|>\n$")


def test_pieces_without_trained_tokens_are_no_sign_of_a_wrong_mask(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat("x" * 1000, "Hello")])
    data = build(tmp_path, {"too_long": "split"})
    (text,) = texts(samples_of(data), trained=True)
    assert text == "Hello<|im_end|>\n$" and report_of(data).untrained == 0


def test_what_has_nothing_to_train(tmp_path: Path) -> None:
    lonely = {"messages": [{"role": "user", "content": "Hi"}]}
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), lonely])
    report = report_of(build(tmp_path))
    assert (report.samples, report.untrained) == (1, 1)
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), lonely, lonely])
    with pytest.raises(DataError, match="3 rows, 1 samples: 2 without a trained token"):
        build(tmp_path)
    write(tmp_path / "rows.jsonl", [chat("Hi" * 100, "Hello")])
    said = "1 rows, 0 samples: 1 too long and truncated, 1 without a trained token dropped"
    with pytest.raises(DataError, match=said) as caught:
        build(tmp_path)
    assert "the first 128 tokens" in caught.value.fix
    with pytest.raises(DataError, match="1 rows, 0 samples: 1 too long and dropped"):
        build(tmp_path, {"too_long": "drop"})
    write(tmp_path / "rows.jsonl", [])
    with pytest.raises(DataError, match="no rows"):
        build(tmp_path)


def test_malformed_rows_are_an_error_or_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.dumps(chat("Hi", "Hello"))
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{good}\n\n{{"messages": [{{"role": "user"}}]}}\n{{oops\n{good}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: message 0 has no content") as raised:
        build(tmp_path)
    assert "malformed: drop" in raised.value.fix
    with caplog.at_level(logging.WARNING):
        data = build(tmp_path, {"malformed": "drop"})
    assert (len(data.train), report_of(data).malformed) == (2, 2)
    assert "2 malformed rows dropped (the first: " in caplog.text
    assert "rows.jsonl:3: message 0 has no content" in caplog.text
    file.write_text("{oops\n")
    with pytest.raises(DataError, match="1 rows, 0 samples: 1 malformed rows dropped"):
        build(tmp_path, {"malformed": "drop"})


def test_a_template_that_never_ends_is_an_error_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows are dropped: which ones must not depend on the machine."""
    monkeypatch.setattr(maker, "LIMIT_S", 0.5)
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), chat("cost", "Hello")])
    costly = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = f"{{% if 'cost' in messages[0].content %}}{costly}{{% endif %}}"
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template takes more"):
        build(tmp_path, {"malformed": "drop"}, chat_template=template + CHATML.template)


def test_special_tokens_that_a_text_spells_out(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat("What is <|endoftext|>?", "A token.")])
    with pytest.raises(DataError, match=r"spells out the special token <\|endoftext\|>"):
        build(tmp_path)
    samples = samples_of(build(tmp_path, special_tokens="parse"))
    assert texts(samples)[0].count("$") == 2


def test_preferences_share_the_mask_of_their_prompt(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    row = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "four"}],
        "rejected": [{"role": "assistant", "content": "no idea"}],
    }
    write(tmp_path / "rows.jsonl", [row] * 3)
    samples = samples_of(build(tmp_path, {"kind": "preference"}))
    assert (len(samples), samples.rows_per_sample, samples.stream.n_documents) == (3, 2, 6)
    chosen, rejected = samples.rows(1)
    answers = ["four<|im_end|>\n$", "no idea<|im_end|>\n$"]
    assert texts(samples, trained=True) == answers * 3
    n_prompt = len(said("2+2?", "", "")) - len("<|im_end|>\n")
    assert np.array_equal(chosen.input_ids[:n_prompt], rejected.input_ids[:n_prompt])
    assert (chosen.labels[: n_prompt - 1] == IGNORE_INDEX).all()
    assert chosen.labels[n_prompt - 1] == ord("f") and rejected.labels[n_prompt - 1] == ord("n")
    # A pair is dropped as one.
    long = {**row, "rejected": [{"role": "assistant", "content": "x" * 200}]}
    write(tmp_path / "rows.jsonl", [row, long])
    assert len(samples_of(build(tmp_path, {"kind": "preference", "too_long": "drop"}))) == 1
    assert len(samples_of(build(tmp_path, {"kind": "preference"}))) == 2


def test_what_nothing_reads_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = chat("Hi", "Hello"), chat("a", "b")
    one["messages"][1] |= {"thinking": "x", "loss": True, "name": None}
    rows = [{"id": 1, "note": None, **one}, {**other, "id": 2, "score": [], "url": "u"}]
    write(tmp_path / "rows.jsonl", rows)
    build(tmp_path)
    said = [one.getMessage() for one in caplog.records]
    assert said == [
        "rows.jsonl: columns that nothing reads: id, url",
        "rows.jsonl: keys of messages that nothing reads: thinking",
    ]
    template = CHATML.template + "{# messages[0].reasoning_content #}"
    report = report_of(build(tmp_path, chat_template=template))
    assert report.unread_keys == () and report.unread_columns == ("id", "url")


def test_arguments_of_the_template(tmp_path: Path) -> None:
    template = "{% if loud %}LOUD{% endif %}" + CHATML.template
    rows = [
        chat("Hi", "Hello"),
        {**chat("Hi", "Hello"), "chat_template_kwargs": {"loud": True}},
    ]
    write(tmp_path / "rows.jsonl", rows)
    plain, loud = texts(samples_of(build(tmp_path, chat_template=template)))
    assert loud == "LOUD" + plain
    write(tmp_path / "rows.jsonl", [{**rows[0], "chat_template_kwargs": {"messages": []}}])
    with pytest.raises(DataError, match=r"the chat template refuses it: .*'messages'"):
        build(tmp_path)


def test_conversations_with_tools_use_the_template_for_tools(tmp_path: Path) -> None:
    """As `apply_chat_template` of transformers chooses it."""
    templates = {"default": CHATML.template, "tool_use": "{{ tools }}" + CHATML.template}
    tokenizer = make_tokenizer(("<|im_end|>", "<|im_start|>"))
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{**chat("two", "is"), "tools": tools}, chat("two", "is")]
    write(tmp_path / "rows.jsonl", rows)
    data = build(tmp_path, chat_template=None, tokenizer="tokenizer")
    for number, row in enumerate(rows):
        (one,) = samples_of(data).documents(number)
        rendered = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False
        )
        assert one.ids.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert data.tokenizer.chat_template == templates  # saved with an export


def test_processes_make_the_same_samples_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(f"Hi {number}", f"Hello {number}") for number in range(1200)]
    rows[800] = {"messages": []}
    write(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(workers, "ALONE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    data = build(tmp_path, {"malformed": "drop"})
    expected = [said(f"Hi {n}", f"Hello {n}") for n in range(1200) if n != 800]
    assert texts(samples_of(data)) == expected
    assert (report_of(data).rows, report_of(data).malformed) == (1200, 1)
    # The first error is that of the first row.
    with pytest.raises(DataError, match=r"rows\.jsonl:801: it has no messages"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("loss_on", "trained"),
    [
        ("assistant", ["one", "two", "three"]),
        ("completion", ["two", "three"]),
        ("last_assistant", ["three"]),
    ],
)
def test_a_split_trains_what_loss_on_says(
    tmp_path: Path, loss_on: str, trained: list[str]
) -> None:
    turns = chat("Hi", "one", "two", "three")["messages"]
    after = {"role": "user", "content": "Bye"}  # which rewrites the last turn as well
    write(tmp_path / "rows.jsonl", [{"prompt": turns[:3], "completion": [*turns[3:], after]}])
    settings = {"rewritten_history": "split", "loss_on": loss_on}
    template = str(TEMPLATES / "qwen3.jinja")
    data = build(tmp_path, settings, 256, chat_template=template)
    answers = [
        text.removeprefix("<think>\n\n</think>\n\n").split("<")[0]
        for text in texts(samples_of(data), trained=True)
    ]
    assert answers == trained and report_of(data).rewritten == 1


def test_rewritten_history_is_told_what_it_can_do(tmp_path: Path) -> None:
    turns = chat("Hi", "one", "two")["messages"]
    template = str(TEMPLATES / "qwen3.jinja")
    says = r"rows\.jsonl:1: the chat template changes message 1"
    write(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(DataError, match=says) as raised:
        build(tmp_path, chat_template=template)
    assert "`rewritten_history: split`" in raised.value.fix
    other = [*turns[:3], {"role": "assistant", "content": "no"}]
    row = {"prompt": turns[:1], "chosen": turns[1:], "rejected": other[1:]}
    write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=says) as raised:
        build(tmp_path, {"kind": "preference"}, 256, chat_template=template)
    assert "rewritten_history" not in raised.value.fix and "`prompt`" in raised.value.fix


def test_a_surrogate_is_malformed(tmp_path: Path) -> None:
    """JSON allows half of a pair; no tokenizer does."""
    write(tmp_path / "rows.jsonl", [chat("\ud800", "Hello"), chat("Hi", "Hello")])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* surrogate"):
        build(tmp_path)
    data = build(tmp_path, {"malformed": "drop"})
    assert (len(data.train), report_of(data).malformed) == (1, 1)
    write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "\udfff"}])
    with pytest.raises(DataError, match="surrogate"):
        build(tmp_path, chat_template=None)


def test_an_optional_column_may_begin_late(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {}}]  # nothing that a template must write
    rows = [*[chat("Hi", "Hello")] * 513, {**chat("Hi", "Hello"), "fns": tools}]
    write(tmp_path / "rows.jsonl", rows)
    assert len(samples_of(build(tmp_path, {"columns": {"tools": "fns"}}))) == 514
    with pytest.raises(DataError, match="has no column `functions`; its columns are messages"):
        build(tmp_path, {"columns": {"tools": "functions"}})


def test_json_may_begin_with_a_mark_and_blank_lines(tmp_path: Path) -> None:
    rows = [chat("Hi", "Hello"), chat("a", "b")]
    file = tmp_path / "rows.json"
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        file.write_text("\ufeff \n\n  " + text, encoding="utf-8")
        assert len(samples_of(build(tmp_path, {"path": "rows.json"}))) == 2


def test_held_out_rows_leave_no_piece_in_the_training_data(tmp_path: Path) -> None:
    rows = [chat(f"Hi {i}", chr(ord("A") + i) * 200) for i in range(10)]
    write(tmp_path / "rows.jsonl", rows)
    for packing in ("none", "greedy"):
        data = build(
            tmp_path, {"too_long": "split"}, 100, validation_fraction=0.3, packing=packing
        )
        (held_out,) = data.validation.values()
        kept, apart = (
            set("".join(texts(side, trained=True))) & set("ABCDEFGHIJ")
            for side in (samples_of(data), held_out)
        )
        assert (len(kept), len(apart)) == (7, 3) and not kept & apart


def test_fingerprints(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello", "again"), chat("a", "b")])
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.template)
    variants = [
        build(tmp_path),
        build(tmp_path, {"loss_on": "all"}),
        build(tmp_path, {"too_long": "drop"}),
        build(tmp_path, length=129),
        build(tmp_path, packing="greedy"),
        build(tmp_path, chat_template="t.jinja"),
        build(tmp_path, special_tokens="parse"),
        build(tmp_path, validation_fraction=0.5),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    assert build(tmp_path).fingerprint == variants[0].fingerprint


def test_a_warm_start_reads_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), chat("Hi", "x" * 200)])
    first = build(tmp_path, packing="greedy")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("toolkit.data.records.Records.__iter__", None)
        again = build(tmp_path, packing="greedy")
    assert texts(samples_of(again)) == texts(samples_of(first))
    assert samples_of(again).rows(0)[0].segments is not None, "isolated"
    assert "1 too long and truncated" in caplog.text  # every start says so
    (report,) = (tmp_path / "dmt-cache" / "tokens").glob("*.json")
    report.unlink()  # the entry is made again
    assert report_of(build(tmp_path, packing="greedy")) == report_of(first)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_trl_trains_the_same_tokens(tmp_path: Path) -> None:
    """TRL's own tokenisation: `assistant_masks`."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    template = (TEMPLATES / "chatml_generation.jinja").read_text()
    tokenizer = make_tokenizer(("<|im_end|>", "<|im_start|>"), chat_template=template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    common = {"output_dir": str(tmp_path / "trl"), "report_to": "none", "use_cpu": True}
    ours = {"tokenizer": "tokenizer", "chat_template": None, "length": 512}
    rows: list[Row] = [{"messages": messages} for messages in conversations(CHATML, 20)]
    write(tmp_path / "rows.jsonl", rows)
    sft = SFTTrainer(
        model,
        SFTConfig(assistant_only_loss=True, bf16=False, **common),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    samples = samples_of(build(tmp_path, **ours))
    for index, theirs in enumerate(sft.train_dataset):
        (one,) = samples.documents(index)
        assert one.ids.tolist() == theirs["input_ids"]
        wanted = theirs.get("assistant_masks") or [x != -100 for x in theirs["labels"]]
        assert one.trained.tolist() == [bool(x) for x in wanted]


def test_a_users_own_loop_gets_no_rows_that_it_would_mix_up(tmp_path: Path) -> None:
    from launch.examples.recipe_samples import RecipeSamples
    from tests.recipe.good import GOOD
    from toolkit.intake.load import load_recipe

    (tmp_path / "recipe.yaml").write_text(GOOD)
    source = f"{{kind: chat, path: {tmp_path / 'rows.jsonl'}}}"
    data = f"data={{train: {source}, chat_template: chatml, packing: greedy}}"
    overrides = [data, "evaluation.every_steps=null", "training.objective=sft"]
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    with pytest.raises(DataError, match="isolates the documents or conversations"):
        RecipeSamples(recipe)


ENDS = """#!{}
import os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.recv_bytes(), connection.recv_bytes()
os.write(connection.fileno(), {})
"""


@pytest.mark.parametrize("answer", [b"", b"\0\0\1\0half of it"])
def test_a_process_that_ends_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello")] * 600)
    (tmp_path / "ends").write_text(ENDS.format(sys.executable, answer))
    (tmp_path / "ends").chmod(0o755)
    monkeypatch.setattr(workers, "ALONE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "ends"))
    with pytest.raises(DataError, match="a process that renders chats has ended"):
        build(tmp_path)
