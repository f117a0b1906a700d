"""What makes two runs the same run: the configuration without paths, and the fingerprints of what the paths hold."""

from pathlib import Path

from lm.base.config import build, content_hash, to_dict
from lm.data.config import VALIDATION
from lm.data.corpus import Corpus
from lm.run.folder import MAY_CHANGE, RunFolder
from lm.train.config import AnyRun, RunConfig


def identity_of(config: AnyRun, corpus: Corpus) -> dict[str, str]:
    """Fingerprints by name: corpus, tokenizer, evaluation sets and, where there is one, the run started from."""
    identity = {
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.fingerprint,
        "evaluation": corpus.evaluation,
        **{f"evaluation/{name}": file.fingerprint for name, file in corpus.held_out.items() if name != VALIDATION},
    }
    if isinstance(config, RunConfig) and config.init_from is not None:
        source = RunFolder(Path(config.init_from)).read_config()
        trained = "steps" in source["config"]  # else imported
        name = cell_id(build(RunConfig, source["config"]), source["identity"]) if trained else content_hash(source)
        identity["init_from"] = name
    return identity


def cell_id(config: AnyRun, identity: dict[str, str]) -> str:
    """The run's name: a hash that moves with every number and text it depends on, and with no path."""
    values = to_dict(config, whole=False)
    for name in (*MAY_CHANGE, "init_from"):
        values.pop(name, None)  # not every kind of run has it
    for name in ("corpus", "mixture", "tokenizer", "separator", "validation_fraction", "extra_validation"):
        values["data"].pop(name, None)  # a field at a default that came later is not there
    return content_hash({"config": values, "identity": identity})
