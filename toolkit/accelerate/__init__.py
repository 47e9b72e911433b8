"""Accelerate and the Hugging Face Trainer with the parallelism of a recipe.

For your own loop:

    accelerator = toolkit.accelerate.prepare("recipe.yaml")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

For transformers' Trainer:

    arguments = toolkit.accelerate.training_arguments("recipe.yaml", output_dir="out")

Start the script with any launcher: `accelerate launch`, `torchrun`, `deepspeed`, or plain
`python` for one process. docs/accelerate.md describes what each of the two takes from the
recipe.
"""

from toolkit.accelerate.scripts import prepare, training_arguments

__all__ = ["prepare", "training_arguments"]
