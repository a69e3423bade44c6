"""eagle generate, chat, fetch, demo; and the command as a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import eagle_engine.cli
import pytest
from cli_runner import one_error, pair, plant_difference, prompts, run  # noqa: F401  (fixtures)
from eagle_engine.engine import Engine
from eagle_engine.outputs import TextDelta
from tiny_pair import CHARACTERS, save_tokenizer
from tiny_targets import save_directory


# generate


def test_generate_streams_one_answer(run):
    options = ("Hello", "--max-new-tokens", 12, "--ignore-eos")
    status, out, err = run("generate", *options)
    _, plain, _ = run("generate", *options, "--draft", "none")
    _, as_json, _ = run("generate", *options, "--json")
    (output,) = json.loads(as_json)["outputs"]
    assert status == 0 and out == plain == output["text"] + "\n"
    assert err.startswith("[12 tokens, ") and f"acceptance length {output['stats']['acceptance_length']:.2f}]" in err
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 12 and output["prompt"] == "Hello"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_generate_counts_steps_of_short_answers(run, max_tokens):
    status, _, err = run("generate", "Hello", "--max-new-tokens", max_tokens, "--ignore-eos")
    assert status == 0 and err.startswith(f"[{max_tokens} tokens, ")
    assert ("acceptance length 1.00" in err) == (max_tokens == 2)


def test_generate_prompts_from_everywhere(run, prompts):
    options = ("--max-new-tokens", 4, "--ignore-eos", "--json")
    answers = json.loads(run("generate", "Say one.", "x = 3 + 4", *options)[1])["outputs"]
    assert [output["id"] for output in answers] == ["1", "2"]
    from_file = json.loads(run("generate", "--prompts", prompts, "--limit", 2, *options, "--batch-size", 2)[1])["outputs"]
    assert [output["id"] for output in from_file] == ["one", "two"]
    assert [output["token_ids"] for output in answers] == [output["token_ids"] for output in from_file]
    (from_stdin,) = json.loads(run("generate", *options, stdin="Say one.\n")[1])["outputs"]
    assert from_stdin["token_ids"] == answers[0]["token_ids"]
    text = run("generate", "--prompts", prompts, "--max-new-tokens", 4)[1]
    assert [line for line in text.splitlines() if line.startswith("===")] == ["=== one", "=== two", "=== three"]


def test_generate_chat_template_system_and_raw(run):
    def prompt_ids(*options):
        return json.loads(run("generate", "ab", "--max-new-tokens", 1, "--json", *options)[1])["outputs"][0]["prompt_token_ids"]

    ids = {character: i + 3 for i, character in enumerate(CHARACTERS)}
    assert prompt_ids("--raw") == [ids[c] for c in "ab"]
    assert prompt_ids() == [ids[c] for c in "u:ab\na:"]
    assert prompt_ids("--system", "s") == [ids[c] for c in "s:s\nu:ab\na:"]


def test_generate_goes_on_after_a_prompt_that_fails(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "prompt": text}) for name, text in (("a", "Hi"), ("long", "x" * 50), ("c", "Yo"))))
    options = ("--prompts", file, "--max-model-len", 40, "--max-new-tokens", 5, "--ignore-eos")
    status, out, err = run("generate", *options, "--json")
    outputs = json.loads(out)["outputs"]
    assert status == 2 and [len(output["token_ids"]) for output in outputs] == [5, 0, 5]
    assert outputs[1]["finish_reason"] == "error" and "no room" in outputs[1]["error"]
    assert "eagle: error: prompt long: the prompt has 55 tokens" in err
    assert run("generate", *options)[0] == 2
    assert "no room" in one_error(run("generate", "x" * 50, "--max-model-len", 40)).strip()


def test_generate_stop_strings_and_tokens(run):
    whole = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--json")[1])["outputs"][0]
    token, text = whole["token_ids"][6], whole["text"]
    stopped = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--stop", text[3:5], "--stop", "never", "--json")[1])["outputs"][0]
    assert stopped["text"] == text[: text.index(text[3:5])] and stopped["stop_reason"] == text[3:5]
    stopped = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--stop-token-id", token, "--json")[1])["outputs"][0]
    assert stopped["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1] and stopped["stop_reason"] == token


def test_generate_penalties_forms_and_logprobs(run, tmp_path):
    options = ("Hello", "--max-new-tokens", 20, "--json")
    plain = json.loads(run("generate", *options, "--ignore-eos")[1])["outputs"][0]
    assert "logprobs" not in plain and "answers" not in plain
    for option in (("--repetition-penalty", 1.5), ("--presence-penalty", 1.9), ("--frequency-penalty", 1.9)):
        assert json.loads(run("generate", *options, "--ignore-eos", *option)[1])["outputs"][0]["token_ids"] != plain["token_ids"], option
    told = json.loads(run("generate", *options, "--ignore-eos", "--logprobs", 2)[1])["outputs"][0]
    assert told["token_ids"] == plain["token_ids"] and [place[0]["token_id"] for place in told["logprobs"]] == plain["token_ids"]
    assert told["cumulative_logprob"] == sum(place[0]["logprob"] for place in told["logprobs"]) and all(len(place) == 2 for place in told["logprobs"])
    assert json.loads(run("generate", *options, "--regex", "[ab]{5}!")[1])["outputs"][0]["text"].rstrip("ab!") == ""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    grammar.write_text('start: ("x" | "y")+ "?"')
    assert 10 <= int(json.loads(run("generate", *options, "--json-schema", schema)[1])["outputs"][0]["text"]) <= 99
    assert set(json.loads(run("generate", *options, "--grammar", grammar)[1])["outputs"][0]["text"]) <= set("xy?")
    long = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--min-tokens", 9, "--stop-token-id", plain["token_ids"][0], "--ignore-eos", "--json")[1])["outputs"][0]
    assert len(long["token_ids"]) >= 10
    assert "add --json" in one_error(run("generate", "Hello", "--logprobs", 2))
    assert "--grammar" in one_error(run("generate", "Hello", "--grammar", tmp_path / "nowhere"))
    assert "not allowed with" in one_error(run("generate", "Hello", "--grammar", grammar, "--regex", "a"))
    schema.write_text("{")
    assert "no JSON" in one_error(run("generate", "Hello", "--json-schema", schema))


def test_generate_several_answers(run):
    options = ("generate", "Hello", "--max-new-tokens", 8, "--ignore-eos", "--temperature", 1.5, "--seed", 4, "--n", 3)
    status, out, err = run(*options)
    output = json.loads(run(*options, "--json")[1])["outputs"][0]
    texts = [answer["text"] for answer in output["answers"]]
    assert status == 0 and out == "".join(f"=== 1, answer {i + 1}\n{text}\n\n" for i, text in enumerate(texts)) and "24 tokens" in err
    assert len(set(texts)) == 3 and output["text"] == texts[0]
    assert run("generate", "Hello", "--max-new-tokens", 8, "--ignore-eos", "--temperature", 1.5, "--seed", 5)[1] == texts[1] + "\n"


# chat


def test_chat_remembers_and_resets(run):
    options = ("--max-new-tokens", 6, "--ignore-eos", "--json")
    status, out, err = run("chat", *options, stdin="Hi\nWhy?\n\n/reset\nWhy?\n/help\n/exit\nnever\n")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(answers) == 3 and err == "commands are /reset and /exit\n"
    assert set(answers[0]) == {"text", "token_ids", "finish_reason", "tokens_per_second"}
    fresh = json.loads(run("chat", *options, stdin="Why?")[1])
    assert answers[2]["token_ids"] == fresh["token_ids"] != answers[1]["token_ids"]
    assert run("chat", "--max-new-tokens", 6, "--ignore-eos", stdin="Why?\n")[1] == fresh["text"] + "\n"


def test_chat_survives_ctrl_c_and_a_full_context(run, monkeypatch):
    calls = []

    def stream(self, prompt, params):
        calls.append(prompt)
        yield TextDelta("half", [5, 6], None, None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "stream", stream)
        status, out, err = run("chat", stdin="Hi\nYo\n")
    assert (status, out, err) == (0, "half\nhalf\n", "[stopped]\n[stopped]\n")
    assert len(calls[1]) > len(calls[0])  # the half answer is part of the conversation
    status, out, err = run("chat", "--max-model-len", 30, "--ignore-eos", "--max-new-tokens", 5, "--json", stdin=f"Hi\n{'x' * 30}\nYo\n")
    assert status == 0 and len(out.splitlines()) == 2
    assert "eagle: error: the prompt has" in err and err.endswith("; /reset starts over\n")


def test_chat_needs_a_template(run, tmp_path):
    save_directory(tmp_path, "llama")
    save_tokenizer(tmp_path, template=None)
    assert "no chat template" in one_error(run("chat", "--target", tmp_path))
    assert run("generate", "Hi", "--target", tmp_path, "--max-new-tokens", 2)[0] == 0
    assert "--system" in one_error(run("generate", "Hi", "--target", tmp_path, "--system", "s"))


# fetch and demo


def test_fetch(run, monkeypatch, tmp_path):
    (tmp_path / "weights").write_bytes(b"1234")
    monkeypatch.setattr("eagle_engine.demo.fetch_demo", lambda progress=True: tmp_path / "weights")
    assert run("fetch", models=False) == (0, f"{tmp_path / 'weights'}\n", "")
    assert json.loads(run("fetch", "--json", models=False)[1]) == {"path": str(tmp_path / "weights"), "bytes": 4}


def test_demo(run, monkeypatch):
    options = ("Say one.", "--max-new-tokens", 8, "--ignore-eos")
    status, out, _ = run("demo", *options)
    assert status == 0 and "same tokens           yes\n" in out and "acceptance length" in out and out.count("tokens/s") == 2
    result = json.loads(run("demo", *options, "--json")[1])
    assert result["same_tokens"] is True and result["plain"]["token_ids"] == result["speculative"]["token_ids"]
    plant_difference(monkeypatch, at=2)
    status, out, _ = run("demo", *options)
    assert status == 1 and "same tokens           NO" in out


# as a process of its own


def environment() -> dict[str, str]:
    root = str(Path(eagle_engine.cli.__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])), "OMP_NUM_THREADS": "1"}


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys; from eagle_engine.cli import main\n"
        "for argv in (['--help'], ['bench', '--help'], ['--version']):\n"
        "    try: main(argv)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert main(['generate', '--temperature', 'hot']) == 2\n"
        "assert main(['generate', '--prompts', '/nowhere']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verify" in result.stdout and len(result.stderr.splitlines()) == 2


def test_reader_that_goes_away(pair):
    command = [sys.executable, "-m", "eagle_engine.cli", "inspect", "--target", "none", "--draft", str(pair.draft)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(), err) == (141, "")


def test_ctrl_c_from_outside(pair):
    command = [sys.executable, "-m", "eagle_engine.cli", "chat", "--target", str(pair.target), "--draft", str(pair.draft), "--json", "--max-new-tokens", "2"]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write("Hi\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["finish_reason"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "eagle: interrupted\n")
