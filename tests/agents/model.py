"""A scripted model: plays a list of tool calls to whatever agent asks, and writes requests down.

A program by itself, standard library alone, so that it can be started in any network namespace:

    model.py ADDRESS PORT SCRIPT LOG [CERTIFICATE]

SCRIPT is a JSON list of steps: `{"shell": COMMAND}` and `{"write": PATH, "text": TEXT}`. How many
tool results a conversation holds says which step is next; after the last one the model says
`ANSWER`. Requests that offer no tools (titles, summaries, counts of tokens) get a short text.
LOG gets one JSON line per request, with its body: whatever an agent sends out can be looked for.
"""

from __future__ import annotations

import http.server
import json
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

ANSWER = "the scripted work is finished"
# Names under which agents offer a shell, and a way to write a file.
SHELLS = ("Bash", "bash", "shell_command", "exec_command", "shell", "run_shell_command")
WRITERS = ("Write", "write", "write_file", "create")
# Arguments of those tools: the same thing under many names.
COMMAND = ("command", "cmd")
PATH = ("file_path", "filePath", "path", "absolute_path")
TEXT = ("content", "file_text", "contents", "text")

Json = dict[str, Any]
Step = dict[str, str]


# --- what to do next (pure)


def call(step: Step, tools: dict[str, Json]) -> tuple[str, Json] | None:
    """The tool and its arguments for a step, in the agent's own words."""
    names = SHELLS if "shell" in step else WRITERS
    name = next((name for name in names if name in tools), None)
    if name is None:
        return None
    schema = tools[name]
    required = schema.get("required") or []
    return name, {
        key: value
        for key, kind in (schema.get("properties") or {}).items()
        if (value := _argument(key, kind, step)) is not None or key in required
    }


def _argument(key: str, kind: Json, step: Step) -> object:
    """One argument; what a step does not say is only filled in where it is required."""
    array = kind.get("type") == "array"
    if key in COMMAND:
        return ["bash", "-c", step["shell"]] if array else step["shell"]
    if key in PATH and "write" in step:
        return step["write"]
    if key in TEXT and "write" in step:
        return step["text"]
    if key in {"timeout", "timeout_ms", "yield_time_ms", "initial_wait", "initial_wait_seconds"}:
        return 120 if "seconds" in key or key == "initial_wait" else 120_000
    if key == "is_background":
        return False
    return "scripted" if key in {"description", "sessionId"} else None


def plan(steps: list[Step], done: int, tools: dict[str, Json]) -> tuple[str, Json] | None:
    """What the model does now: a tool call, or None for its last words."""
    calls = [found for step in steps if (found := call(step, tools)) is not None]
    return calls[done] if done < len(calls) else None


# --- Anthropic Messages


def messages(steps: list[Step], asked: Json) -> list[tuple[str, Json]]:
    """The events of an answer to POST /v1/messages."""
    tools = {t["name"]: t.get("input_schema") or {} for t in asked.get("tools") or []}
    blocks = [
        block
        for message in asked["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
    ]
    done = sum(block.get("type") == "tool_result" for block in blocks)
    wanted = plan(steps, done, tools)
    start = {
        "id": "msg_1", "type": "message", "role": "assistant", "content": [],
        "model": asked.get("model", "scripted"), "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 1},
    }  # fmt: skip
    events: list[tuple[str, Json]] = [("message_start", {"message": start})]
    if wanted is None:
        block: Json = {"type": "text", "text": ""}
        delta: Json = {"type": "text_delta", "text": ANSWER}
    else:
        name, arguments = wanted
        block = {"type": "tool_use", "id": f"toolu_{done}", "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
    reason = "end_turn" if wanted is None else "tool_use"
    end = {"stop_reason": reason, "stop_sequence": None}
    return [
        *events,
        ("content_block_start", {"index": 0, "content_block": block}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": end, "usage": {"output_tokens": 5}}),
        ("message_stop", {}),
    ]


def message(events: list[tuple[str, Json]]) -> Json:
    """The same answer in one piece, for who does not stream."""
    said = dict(events)
    whole: Json = dict(said["message_start"]["message"])
    block = dict(said["content_block_start"]["content_block"])
    delta = said["content_block_delta"]["delta"]
    if block["type"] == "text":
        block["text"] = delta["text"]
    else:
        block["input"] = json.loads(delta["partial_json"])
    return {**whole, "content": [block], **said["message_delta"]["delta"]}


# --- OpenAI Responses


def responses(steps: list[Step], asked: Json) -> list[tuple[str, Json]]:
    """The events of an answer to POST /v1/responses."""
    tools = {
        t["name"]: t.get("parameters") or {}
        for t in asked.get("tools") or []
        if t.get("type") == "function"
    }
    given = asked["input"] if isinstance(asked["input"], list) else []
    done = sum(str(item.get("type", "")).endswith("call_output") for item in given)
    wanted = plan(steps, done, tools)
    whole: Json = {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress",
        "model": asked.get("model", "scripted"), "output": [], "parallel_tool_calls": False,
        "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    if wanted is None:
        part = {"type": "output_text", "text": ANSWER, "annotations": []}
        item: Json = {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [part],
        }  # fmt: skip
        spoken: list[tuple[str, Json]] = [
            ("response.content_part.added", {"part": {**part, "text": ""}}),
            ("response.output_text.delta", {"delta": ANSWER}),
            ("response.output_text.done", {"text": ANSWER}),
            ("response.content_part.done", {"part": part}),
        ]
        inner: list[tuple[str, Json]] = [
            (k, {"item_id": "msg_1", "content_index": 0, **v}) for k, v in spoken
        ]
        empty: Json = {**item, "status": "in_progress", "content": []}
    else:
        name, arguments = wanted
        text = json.dumps(arguments)
        item = {
            "type": "function_call", "id": f"fc_{done}", "call_id": f"call_{done}", "name": name,
            "arguments": text, "status": "completed",
        }  # fmt: skip
        inner = [
            ("response.function_call_arguments.delta", {"item_id": f"fc_{done}", "delta": text}),
            ("response.function_call_arguments.done", {"item_id": f"fc_{done}", "arguments": text}),
        ]
        empty = {**item, "arguments": "", "status": "in_progress"}
    usage = {
        "input_tokens": 10, "output_tokens": 5, "total_tokens": 15,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    ended = {**whole, "status": "completed", "output": [item], "usage": usage}
    events: list[tuple[str, Json]] = [
        ("response.created", {"response": whole}),
        ("response.output_item.added", {"output_index": 0, "item": empty}),
        *((name, {"output_index": 0, **data}) for name, data in inner),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": ended}),
    ]
    return [(name, {"sequence_number": n, **data}) for n, (name, data) in enumerate(events)]


# --- OpenAI Chat Completions


def chat(steps: list[Step], asked: Json) -> Json:
    """The answer to POST /v1/chat/completions, in one piece."""
    tools = {
        t["function"]["name"]: t["function"].get("parameters") or {}
        for t in asked.get("tools") or []
        if t.get("type") == "function"
    }
    done = sum(m.get("role") == "tool" for m in asked["messages"])
    wanted = plan(steps, done, tools)
    said: Json = {"role": "assistant", "content": ANSWER if wanted is None else None}
    if wanted is not None:
        function = {"name": wanted[0], "arguments": json.dumps(wanted[1])}
        said["tool_calls"] = [{"id": f"call_{done}", "type": "function", "function": function}]
    return {
        "id": "chat_1", "object": "chat.completion", "created": 1,
        "model": asked.get("model", "scripted"),
        "choices": [{
            "index": 0, "message": said, "logprobs": None,
            "finish_reason": "stop" if wanted is None else "tool_calls",
        }],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }  # fmt: skip


def chunks(whole: Json) -> Iterator[Json]:
    """The same answer as a stream."""
    choice = whole["choices"][0]
    delta = dict(choice["message"])
    delta["content"] = delta["content"] or ""
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **one} for one in delta["tool_calls"]]
    head = {**whole, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**head, "choices": [ended], "usage": usage}


# --- Gemini


def gemini(steps: list[Step], asked: Json) -> Json:
    """The answer to generateContent; a stream has it as its only event."""
    declared = [
        declaration
        for tool in asked.get("tools") or []
        for declaration in tool.get("functionDeclarations") or []
    ]
    tools = {
        d["name"]: d.get("parametersJsonSchema") or d.get("parameters") or {} for d in declared
    }
    parts = [part for content in asked["contents"] for part in content.get("parts") or []]
    wanted = plan(steps, sum("functionResponse" in part for part in parts), tools)
    part: Json = {"text": ANSWER}
    if wanted is not None:
        part = {"functionCall": {"name": wanted[0], "args": wanted[1]}}
    count = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    content = {"role": "model", "parts": [part]}
    return {
        "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
        "usageMetadata": count,
        "modelVersion": "scripted",
    }


# --- the server


class Handler(http.server.BaseHTTPRequestHandler):
    """Knows the four protocols by their paths."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        """Lists of models; anything else is not there. No upgrade: clients fall back to POST."""
        self.server.note(self, b"")
        if self.path.partition("?")[0].rstrip("/").endswith("/models"):
            self._json({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        else:
            self._json({"error": {"message": "not here", "type": "not_found_error"}}, 404)

    def do_HEAD(self) -> None:
        """Claude looks whether anybody is there."""
        self.server.note(self, b"")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Every question."""
        body = self._body()
        self.server.note(self, body)
        asked: Json = json.loads(body or b"{}")
        path = self.path.partition("?")[0]
        for ending, answer in ANSWERS.items():
            if path.endswith(ending):
                answer(self, asked)
                return
        self._json({"error": {"message": "not here", "type": "not_found_error"}}, 404)

    def send_messages(self, asked: Json) -> None:
        """Anthropic."""
        events = messages(self.server.steps, asked)
        if asked.get("stream"):
            self._events((name, {"type": name, **data}) for name, data in events)
        else:
            self._json(message(events))

    def send_responses(self, asked: Json) -> None:
        """OpenAI, the newer."""
        events = responses(self.server.steps, asked)
        if asked.get("stream"):
            self._events((name, {"type": name, **data}) for name, data in events)
        else:
            self._json(events[-1][1]["response"])

    def send_chat(self, asked: Json) -> None:
        """OpenAI, the older."""
        whole = chat(self.server.steps, asked)
        if asked.get("stream"):
            self._events((("", chunk) for chunk in chunks(whole)), end="data: [DONE]\n\n")
        else:
            self._json(whole)

    def send_generate(self, asked: Json) -> None:
        """Gemini, in one piece."""
        self._json(gemini(self.server.steps, asked))

    def send_stream(self, asked: Json) -> None:
        """Gemini, as a stream."""
        self._events([("", gemini(self.server.steps, asked))])

    def send_tokens(self, _: Json) -> None:
        """How long a text is; both spellings of the answer."""
        self._json({"input_tokens": 10, "totalTokens": 10})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: Json, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _events(self, events: Any, end: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for name, data in events:
            head = f"event: {name}\n" if name else ""
            self._chunk(f"{head}data: {json.dumps(data)}\n\n")
        if end:
            self._chunk(end)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """The log is the server's."""


# The first that fits: longer endings before shorter ones.
ANSWERS: dict[str, Callable[[Handler, Json], None]] = {
    "/messages/count_tokens": Handler.send_tokens,
    ":countTokens": Handler.send_tokens,
    "/messages": Handler.send_messages,
    "/responses": Handler.send_responses,
    "/chat/completions": Handler.send_chat,
    ":streamGenerateContent": Handler.send_stream,
    ":generateContent": Handler.send_generate,
}


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One thread per connection, and a log."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], script: str, log: str) -> None:
        self._script = script
        self._log = log
        self._lock = threading.Lock()
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Without a lookup of our own name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def steps(self) -> list[Step]:
        """Read anew each time: the next agent has others."""
        with open(self._script, encoding="utf-8") as file:
            steps: list[Step] = json.load(file)
        return steps

    def note(self, request: Handler, body: bytes) -> None:
        """Write a request down."""
        keys = ("x-api-key", "authorization", "x-goog-api-key")
        line = {
            "method": request.command,
            "path": request.path,
            "keys": [request.headers[key] for key in keys if request.headers[key]],
            "body": body.decode("utf-8", "replace"),
        }
        with self._lock, open(self._log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Serve until killed."""
    address, port, script, log, *certificate = sys.argv[1:]
    server = Server((address, int(port)), script, log)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate[0])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
