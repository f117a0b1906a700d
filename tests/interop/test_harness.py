"""lm-evaluation-harness on runs: on tasks of its three kinds, from local files, its numbers are those of our scorer."""

import json
import math
import sys

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.data.tokenizer import ByteTokenizer
from lm.decode import generate
from lm.interop.exporting import export_model
from lm.interop.importing import import_model
from lm.run.restore import load_model
from tests.interop.runs import LLAMA, make_run
from tests.model import variants

pytestmark = pytest.mark.slow  # its import alone takes seconds

SHAPE = variants.replace(LLAMA, context_length=24, n_layer=1, vocab_size=260)
BEGIN, END = 257, 256

QUESTIONS = [
    {"question": "2 + 2 =", "choices": ["four", "5", "a longer answer"], "answer": 0},
    {"question": "a question that fills the context and more:", "choices": ["yes", "no"], "answer": 1},
    {"question": "x ", "choices": ["b", "bb", "bbb"], "answer": 2},
]
TEXTS = [{"text": "short"}, {"text": "a text of more than two windows, with its end in a third one."}, {"text": "n\nt"}]
PROMPTS = [{"prompt": "def "}, {"prompt": "a prompt that is cut at its beginning"}]

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "answer": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{prompt}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra 'harness')")
        import lm.interop.harness

        yield lm.interop.harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run as trained here, one that was imported, whose documents begin with a token of their own, and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    make_run(folder / "trained", SHAPE)
    export_model(folder / "trained", folder / "out")
    tokenizer = json.loads(ByteTokenizer().to_json())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": BEGIN, "content": "<begin>"})
    (folder / "out" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "out" / "config.json").read_text())
    (folder / "out" / "config.json").write_text(json.dumps({**config, "bos_token_id": BEGIN}))
    import_model(folder / "out", folder / "imported")
    for name, rows in (("choice", QUESTIONS), ("rolling", TEXTS), ("answer", PROMPTS)):
        write_task(folder, name, TASKS[name], rows)
    return folder


def write_task(folder, name, task, rows):
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (folder / f"{name}.yaml").write_text(source + task)


def log_probs(ids):
    """Of each token but the first its log-probability, and whether it is the likeliest, by one plain forward pass."""
    logits_TV = np.asarray(variants.logits(SHAPE, variants.parameters(SHAPE), np.array([ids], np.int32)))[0]
    logits_TV = logits_TV.astype(np.float64) - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))
    targets = np.array(ids[1:])
    return logits_TV[np.arange(len(targets)), targets], np.argmax(logits_TV[:-1], axis=-1) == targets


def continuation(begin, context, text):
    """(log-probability, greedy) of `text` after `context`, of which the end is seen where all is too long."""
    ids = [begin, *context.encode(), *text.encode()][-SHAPE.context_length - 1 :]
    scores, greedy = log_probs(ids)
    return scores[-len(text) :].sum(), bool(greedy[-len(text) :].all())


def rolling(begin, text):
    """Windows of the whole context, the last one ending with the text; each token scored by the first that holds it."""
    ids, total, done, size = [begin, *text.encode()], 0.0, 1, SHAPE.context_length
    while done < len(ids):
        end = min(done + size, len(ids))
        scores, _ = log_probs(ids[max(0, end - size - 1) : end])
        total += scores[done - end :].sum()
        done = end
    return total


def results(folder, run, capsys, *tasks):
    asked = [part for task in tasks for part in ("--harness", str(folder / f"{task}.yaml"))]
    assert main(["eval", "--checkpoint", str(folder / run), *asked, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("run", "begin"), [("trained", END), ("imported", BEGIN)])
def test_all_kinds_of_tasks_give_the_numbers_of_our_scorer(harness, folder, capsys, run, begin):
    found = results(folder, run, capsys, "choice", "rolling", "answer")
    assert found["n-samples"]["choice"] == {"original": 3, "effective": 3}
    right = by_byte = 0
    for row in QUESTIONS:
        # The harness joins them with a space, and gives a context's trailing spaces to the continuation.
        context, joined = row["question"].rstrip(), row["question"][len(row["question"].rstrip()) :] + " "
        scores = [continuation(begin, context, joined + choice)[0] for choice in row["choices"]]
        right += int(np.argmax(scores) == row["answer"])
        by_byte += int(np.argmax(np.array(scores) / [len(choice) for choice in row["choices"]]) == row["answer"])
    assert found["results"]["choice"]["acc,none"] == pytest.approx(right / 3)
    assert found["results"]["choice"]["acc_norm,none"] == pytest.approx(by_byte / 3)
    nats = -sum(rolling(begin, row["text"]) for row in TEXTS)
    size = sum(len(row["text"]) for row in TEXTS)
    words = sum(len(row["text"].split()) for row in TEXTS)
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["results"]["rolling"]["word_perplexity,none"] == pytest.approx(math.exp(nats / words), rel=1e-3)
    assert "exact_match,none" in found["results"]["answer"]


@pytest.mark.parametrize(("run", "begin"), [("trained", END), ("imported", BEGIN)])
def test_each_request_is_answered_by_scorer_and_decoder(harness, folder, run, begin):
    from lm_eval.api.instance import Instance

    loaded = load_model(folder / run)
    model = harness.HarnessModel(loaded)

    def ask(kind, *arguments):
        asked = [Instance(kind, {}, given, place) for place, given in enumerate(arguments)]
        return getattr(model, kind)(asked)

    letters = range(97, 123)
    logits_LTV = variants.logits(SHAPE, variants.parameters(SHAPE), np.array([[begin, letter] for letter in letters]))
    likeliest = zip(map(chr, letters), np.argmax(logits_LTV[:, -1], axis=-1), strict=True)
    text, token = next((text, token) for text, token in likeliest if 32 < token < 127)
    pairs = [("ab", "c"), ("", "begins"), ("context longer than the model reads", "ab"), (text, chr(token))]
    assert continuation(begin, *pairs[-1])[1]
    for (score, is_greedy), pair in zip(ask("loglikelihood", *pairs), pairs, strict=True):
        expected, likeliest_all = continuation(begin, *pair)
        assert score == pytest.approx(expected, abs=1e-4)  # float32, other products
        assert is_greedy == likeliest_all
    texts = [(row["text"],) for row in (*TEXTS, {"text": ""}, {"text": "x" * SHAPE.context_length})]
    assert ask("loglikelihood_rolling", *texts) == pytest.approx([rolling(begin, text) for (text,) in texts], abs=1e-3)
    long = PROMPTS[1]["prompt"]
    ends, other = ({"until": until, "max_gen_toks": 6} for until in (["\n", ""], [" "]))
    answers = ask("generate_until", ("def ", ends), ("", other), (long, other), (long, ends))
    cut = [*long.encode()][-(SHAPE.context_length - 6) :]  # room for the answer
    for places, prompts, stop in (((3, 0), (cut, [begin, *b"def "]), "\n"), ((2, 1), (cut, [begin]), " ")):
        own = generate(loaded, [np.array(ids) for ids in prompts], max_tokens=6, temperature=0.0, stop=[stop])
        assert [answers[place] for place in places] == [found.text.decode(errors="replace") for found in own]


def test_the_table_is_the_harness_own(harness, folder, capsys):
    assert main(["eval", "--checkpoint", str(folder / "trained"), "--harness", str(folder / "choice.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "|choice|" in printed.replace(" ", "")
    assert "checkpoint step 0" in printed


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("output_type: multiple_choice\ndoc_to_text: '{{nowhere}}'\n", "the harness cannot carry it out"),
        (TASKS["answer"].replace("max_gen_toks: 6", "max_gen_toks: 24"), "leave no room for a prompt"),
        (TASKS["answer"].replace("max_gen_toks: 6", "num_beams: 4"), "generation_kwargs num_beams are not supported"),
    ],
)
def test_a_task_that_cannot_be_carried_out_is_one_line(harness, folder, capsys, task, said):
    write_task(folder, "broken", task, PROMPTS)
    assert main(["eval", "--checkpoint", str(folder / "trained"), "--harness", str(folder / "broken.yaml")]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    (folder / "broken.yaml").unlink()


def test_wrong_requests_are_one_line(folder, capsys, monkeypatch):
    command = ["eval", "--checkpoint", str(folder / "trained"), "--harness"]
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "lm.interop.harness"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "lm_eval", None)
        assert main([*command, "choice"]) == 2
    error = capsys.readouterr().err
    assert "needs the package lm_eval, which is not installed" in error
    assert error.count("\n") == 1
    assert main([*command, "choice", "--stride", "4"]) == 2
    assert "--stride: does not go with --harness" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said(harness, folder, capsys):
    with pytest.raises(UsageError, match="there is no such task file"):
        harness.run_tasks(load_model(folder / "trained"), [str(folder / "none.yaml")])
