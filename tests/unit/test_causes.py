"""The usual causes of a miss, told from pairs of prompts as applications write them; and what is no cause."""

import json

import pytest

from kvass.cache.causes import cause_of

TIME = "a date or time"
ID = "an id that changes"
ORDER = "the same parts in another order"
SYSTEM = "another system message"
TOKENS = "the same text, cut into other tokens"
SPACES = "spaces or line ends"
DROPPED = "earlier text that was left out"


def cause(prompt: str, stored: str, shared: int | None = None) -> str | None:
    """The cause's name; the first token that differs begins where the texts part, or at `shared`."""
    if shared is None:
        shared = next(
            (at for at, (one, other) in enumerate(zip(prompt, stored, strict=False)) if one != other),
            min(len(prompt), len(stored)),
        )
    found = cause_of(prompt[:shared], prompt[shared:], stored[shared:])
    assert found is None or (found.fix and "\n" not in found.fix)
    return None if found is None else found.name


def chat(*messages: tuple[str, str], ended: bool = True) -> str:
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in messages)
    return text if ended else text + "<|im_start|>assistant\n"


RULES = "You are the assistant of Acme's support desk. Answer briefly, and only from the manual below."
MANUAL = (
    "To reset the device, hold the power button for ten seconds.\nThe light blinks twice when it is done."
)
ASKED = ("user", "How do I reset the device, and how do I see that it worked?")
ANSWERED = ("assistant", "Hold the power button for ten seconds; the light blinks twice.")


@pytest.mark.parametrize(
    ("before", "mine", "other", "after"),
    [
        ("The current time is ", "2025-03-03T10:00:01.123Z", "2025-03-03T10:00:57.009Z", f". {RULES}"),
        ("Current date: ", "2025-03-03", "2025-03-04", f"\n{RULES}"),
        ("Today Date: ", "26 Jul 2024", "27 Jul 2024", "\n\nYou are a helpful assistant."),
        ("Today is ", "Monday, March 3, 2025", "Tuesday, March 4, 2025", f".\n{RULES}"),
        ("Now: ", "Mon Mar  3 10:00:00 2025", "Mon Mar  3 10:00:09 2025", f"\n{RULES}"),
        ("It is now ", "9:05 am", "11:47 am", f". {RULES}"),
        ("[", "10:00:01] boot", "10:00:02] boot", " finished without errors"),
        ("generated_at: ", "1741000000", "1741003607", f"\n{RULES}"),
        ('{"ts": ', "1741000000123", "1741003607456", ', "event": "login", "user": "ada"}'),
        ("Stand: ", "03.03.2025", "04.03.2025", f"\n{RULES}"),
        ("as of ", "20250303T100000Z", "20250303T110000Z", f" {RULES}"),
    ],
)
def test_a_date_or_time(before: str, mine: str, other: str, after: str) -> None:
    for head in ("", "<|im_start|>system\n", f"{RULES}\n"):
        assert cause(head + before + mine + after, head + before + other + after) == TIME


@pytest.mark.parametrize(
    ("before", "mine", "other", "after"),
    [
        (
            "Session ",
            "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
            "6fa459ea-ee8a-3ca4-894e-db77e160355e",
            f"\n{RULES}",
        ),
        ("trace=", "3f9a12bc77e0", "77be01aa90cd", f" {RULES}"),
        ("Request #", "4711", "4712", f": {RULES}"),
        ("request number: ", "99", "100", f"\n{RULES}"),
        ('{"request_id": "', "r-10293", "r-10311", '", "text": "hello world"}'),
        ('{"userId": ', "42", "57", ', "plan": "basic"}'),
        ('"tool_call_id": "', "call_9xKq2LmZ8w", "call_Aa71bQpX0c", '", "content": "sunny"'),
        ("Ticket no. ", "18", "19", f"\n{RULES}"),
    ],
)
def test_an_id(before: str, mine: str, other: str, after: str) -> None:
    for head in ("", "<|im_start|>system\n", f"{RULES}\n"):
        assert cause(head + before + mine + after, head + before + other + after) == ID


def tool(name: str, about: str) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }


TOOLS = [
    tool("search", "Search the manual."),
    tool("weather", "Tell the weather."),
    tool("clock", "Tell the time."),
]


def test_tools_in_another_order() -> None:
    head = f"<|im_start|>system\n{RULES}\n# Tools\n"
    for dump in (
        json.dumps,
        lambda tools: json.dumps(tools, indent=2),
        lambda tools: "\n".join(map(json.dumps, tools)),
    ):
        one, other = head + dump(TOOLS), head + dump([TOOLS[2], TOOLS[0], TOOLS[1]])
        assert cause(one + "<|im_end|>\n", other + "<|im_end|>\n") == ORDER
        assert cause(one[: len(head) + 400], other[: len(head) + 400]) in (ORDER, SYSTEM)  # cut off in a tool


def test_json_keys_in_another_order() -> None:
    value = {"name": "Ada", "age": 36, "tags": ["a", "b"], "address": {"city": "London", "zip": "N1"}}
    turned = {key: value[key] for key in ("age", "address", "tags", "name")}
    within = {**value, "address": {"zip": "N1", "city": "London"}}
    for other in (turned, within):
        for indent in (None, 2):
            texts = [f"{RULES}\n{json.dumps(one, indent=indent)}\nWho is it?" for one in (value, other)]
            assert cause(*texts) == ORDER


def test_documents_in_another_order() -> None:
    first, second = (
        f"Manual of the device\n{MANUAL}\n\n",
        "Terms of the warranty\nTwo years from the purchase on.\n\n",
    )
    assert cause(f"{RULES}\n\n{first}{second}Question?", f"{RULES}\n\n{second}{first}Question?") == ORDER


def test_another_system_message() -> None:
    one = chat(("system", RULES), ASKED)
    assert cause(one, chat(("system", RULES.replace("briefly", "in a friendly way")), ASKED)) == SYSTEM
    assert cause(one, chat(ASKED, ended=False), len("<|im_start|>")) == SYSTEM
    role = "<|start_header_id|>{}<|end_header_id|>\n\n"
    llama = f"{role.format('system')}{{}}<|eot_id|>{role.format('user')}Hi"
    assert cause(llama.format("Be brief."), llama.format("Be thorough.")) == SYSTEM
    mistral = "<s>[INST] <<SYS>>\n{}\n<</SYS>>\n\nHello [/INST]"
    assert cause(mistral.format("Be brief."), mistral.format("Be thorough.")) == SYSTEM


def test_an_answer_encoded_again() -> None:
    text = chat(("system", RULES), ASKED, ANSWERED)
    at = text.index("ten seconds; the")
    more = text + chat(("user", "And then?"), ended=False)
    assert cause(more, text, at) == TOKENS
    short = chat(ASKED, ("assistant", "Paris."))
    assert cause(short + "<|im_start|>user", short, short.index("Paris")) == TOKENS  # up to a special token


def test_spaces_and_line_ends() -> None:
    text = f"{RULES}\n\n{MANUAL}\nWhat does the light do?"
    for other in (
        text.replace("\n", "\r\n"),
        text.replace("\n\n", "\n"),
        text.replace("device, hold", "device,  hold"),
        text.replace("seconds.\n", "seconds. \n"),
        text.replace("Answer", "\tAnswer"),
    ):
        assert cause(text, other) == SPACES
        assert cause(other, text) == SPACES
    compact = json.dumps(TOOLS, separators=(",", ":"))
    assert cause(f"# Tools\n{json.dumps(TOOLS)}", f"# Tools\n{compact}") == SPACES


def test_a_history_that_lost_its_beginning() -> None:
    later = ("user", "The light does not blink at all; what should I try next, before I send it back?")
    whole = chat(("system", RULES), ASKED, ANSWERED, later, ended=False)
    assert cause(chat(("system", RULES), later, ended=False), whole) == DROPPED
    log = "".join(
        f"line {number}: the pump of unit {number * 7} reports {number * 31} rpm\n" for number in range(40)
    )
    cut = log[log.index("line 9:") :]
    assert cause(f"The log so far\n{cut}", f"The log so far\n{log}") == DROPPED


@pytest.mark.parametrize(
    ("prompt", "stored"),
    [
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("def add(a, b):\n    return a + b\n", "def sub(a, b):\n    return a - b\n"),
        ("Summarise chapter 3 of the book.", "Summarise chapter 4 of the book."),
        ("There were 1500 people at the fair.", "There were 1800 people at the fair."),
        ("Multiply 12 by 7 and give the result.", "Multiply 15 by 7 and give the result."),
        ("The ratio is 3:16 in favour of tea.", "The ratio is 3:17 in favour of tea."),
        ("Mark 5 exercises as done.", "Mark 6 exercises as done."),
        ("Version 1.2.3 is out, with fixes.", "Version 1.2.4 is out, with fixes."),
        ("The file main3 is open", "The file main4 is open"),
        ("On 2025-03-03 it rained.", "On 2025-04-01 prices rose again."),  # the rest is another text too
        ('{"a": 1, "b": 2}', '{"a": 2, "b": 2}'),
        ('{"flag": 1, "b": 2}', '{"flag": true, "b": 2}'),
        ('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user"',
         '[{"role": "assistant", "content": "No"}, {"role": "user", "content": "Hm"}, {"role": "assistant"'),
        (json.dumps(TOOLS[:1]), json.dumps(TOOLS[1:])),
        ("Hello", "Help"),
        ("The year 2024 was warm.", "The year 2023 was warm."),
        ("Paint it #ff8800 please, all of it", "Paint it #ff8811 please, all of it"),
        (chat(("system", RULES), ASKED), chat(("system", RULES), ("user", "What is the warranty?"))),
        (
            chat(("user", "Why?"), ended=False),
            chat(("user", "So?"), ("assistant", "."), ("user", "Why?"), ended=False),
        ),
        ("a" * 40 + " b", "a" * 50 + " c"),
    ],
)  # fmt: skip
def test_no_cause_is_better_than_a_wrong_one(prompt: str, stored: str) -> None:
    assert cause(prompt, stored) is None
    assert cause(stored, prompt) is None


def test_odd_texts_are_no_trouble() -> None:
    for before, prompt, stored in [
        ("", "", ""),
        ("", "x", ""),
        ("[" * 5000, "[1", "[2"),
        ("{" * 5000, '"a":', '"b":'),
        ("", "\ufffd a b c d e f", "\ufffd a b c d e f"),
        ("x" * 10_000, "\n" * 100, " " * 100),
        ("", "0" * 3000 + "a", "0" * 3000 + "b"),
    ]:
        assert cause_of(before, prompt, stored) is None
