"""What a server of tests/forked.py does before it forks: else, each process does it again."""

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from toolkit.engines.deepspeed.models import import_deepspeed
from toolkit.recipe.words import settings

import_deepspeed()
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns
settings()  # the schema of a recipe
# For its log, which nobody reads, every meeting looks ten times at the files of all modules.
dynamic_rendezvous.get_method_name = lambda *_: ""
