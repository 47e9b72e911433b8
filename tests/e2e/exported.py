"""An export in plain transformers: the run's last validation."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.product import events
from toolkit.data.order import held_out_documents


def assert_export_reproduces_validation(data: Path, run_dir: Path) -> None:
    """A plain transformers loop over the held-out documents gets the run's last number."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    files = sorted(data.iterdir())
    stream, ends = [], set()
    for document in held_out_documents(len(files), 0.2, 7).tolist():
        stream += [*tokenizer(files[document].read_text())["input_ids"], tokenizer.eos_token_id]
        ends.add(len(stream) - 1)
    n_samples = min((len(stream) - 1) // 32, 4 * 8)
    tokens = torch.tensor(stream[: n_samples * 32 + 1])
    labels = tokens[1:].clone()
    labels[[end for end in ends if end < len(labels)]] = -100
    with torch.no_grad():
        logits = model.eval()(tokens[:-1].view(-1, 32)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
    last = events(run_dir, "evaluation")[-1]
    assert last["tokens"] == int((labels != -100).sum())
    assert loss.item() == pytest.approx(last["loss"], rel=1e-5)
