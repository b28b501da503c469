"""An engine without a model: a real program that speaks the frames, for tests of the front.

`python tests/support/stub_engine.py [--load-s S] [--load-fails MESSAGE] [--crash-on-load] … --fd N`.
A raw prompt, or what follows `script:` in a conversation's last message, is its script: words joined by
spaces, each sent as a text delta, but for
`sleep:S` (wait), `gate` (wait until --notes holds a file of this name), `stop` (SIGSTOP itself),
`steps:N` (N tenths of a second of work without events), `die` (SIGKILL itself), `fail` (a Failed),
`exit:N`, `fault:N` (a GPU fault, in a pass of N tokens), `hang` (no more events),
`nonsense` (a frame that can't be read), `reserve:N` (ask for cold-tier space, say what came),
`want:N` (ask for memory for a prompt, wait for the answer),
`limit` (say the request's limit of tokens), `cut` (end for that limit) and `think:TEXT` (a reasoning delta).
A first word of `late` holds the first event back, and of `poison` kills it before any.
`--load-gate FILE` and `--quit-gate FILE` have loading and the end wait for such a file, too.
Counting gives the words; statistics give the cancels seen. `quit.txt` in --notes says how it ended.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from omlxd import wire
from omlxd.chat import (
    Conversation,
    Event,
    Failed,
    Finished,
    Progress,
    RawPrompt,
    ReasoningDelta,
    TextDelta,
    TextPart,
    Usage,
)


def script_of(prompt: Conversation) -> str:
    last = prompt.messages[-1].parts[-1] if prompt.messages[-1].parts else None
    _, mark, script = (last.text if isinstance(last, TextPart) else "").partition("script:")
    return script if mark else "hello there"


class Stub:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.socket = socket.socket(fileno=args.fd)
        self.lock = threading.Lock()
        self.cancelled: set[int] = set()
        self.grants: dict[int, int] = {}
        self.granted = threading.Condition()
        self.answered: set[int] = set()
        self.hot_share = self.freed_share = float("inf")

    def send(self, message: object) -> None:
        with self.lock:
            self.socket.sendall(wire.encode(message))

    def event(self, id: int, event: Event) -> None:
        self.send(wire.Events(events=((id, event),)))

    def memory(self) -> dict[str, float]:
        active, hot, freed = ([*(float(size) * 1e6 for size in self.args.memory.split(",")), 0.0])[:3]
        hot, freed = min(hot, self.hot_share), min(freed, self.freed_share)
        peak = float(self.args.load_peak) * 1e6
        figures = {
            "mlx_active_bytes": active + hot,
            "kv_hot_bytes": hot,
            "mlx_cache_bytes": freed,
            "mlx_load_peak_bytes": peak,
        }
        return figures if active else {}

    def note(self, text: str) -> None:
        if self.args.notes:
            with (Path(self.args.notes) / "notes.txt").open("a") as file:
                file.write(text + "\n")

    def wait_for(self, gate: str) -> None:
        """Until the test has made the file of this name, in --notes."""
        while gate and not (Path(self.args.notes) / gate).exists():
            time.sleep(0.02)

    def run(self) -> None:
        total, available = (int(float(size) * 1e6) for size in self.args.device.split(","))
        self.send(wire.Device(backend="none", total=total, available=available))
        decoder = wire.FrameDecoder(wire.ToEngine)
        while data := self.socket.recv(1 << 18):
            for message in decoder.feed(data):
                self.handle(message)
        self.note("eof")
        os._exit(0)

    def handle(self, message: object) -> None:
        if isinstance(message, wire.Load):
            self.load(message)
        elif isinstance(message, wire.Generate):
            threading.Thread(target=self.generate, args=(message,), daemon=True).start()
        elif isinstance(message, wire.Cancel):
            self.cancelled.add(message.id)
            self.note(f"cancel {message.id}")
        elif isinstance(message, wire.Count):
            assert isinstance(message.prompt, RawPrompt)
            self.send(wire.Counted(id=message.id, result=len(message.prompt.text.split())))
        elif isinstance(message, wire.GetStats):
            self.send(
                wire.Stats(id=message.id, values={"cancels": float(len(self.cancelled)), **self.memory()})
            )
        elif isinstance(message, wire.Grant):
            with self.granted:
                self.grants[message.ticket] = message.nbytes
                self.granted.notify_all()
        elif isinstance(message, wire.Budget):
            self.note(f"budget {message.hot} {message.live} {message.ticket}")
            with self.granted:
                self.answered.add(message.ticket)
                self.granted.notify_all()
            if message.hot is not None:
                self.hot_share = message.hot
            if message.freed is not None:
                self.freed_share = message.freed
        elif isinstance(message, wire.PassLimit):
            self.note(f"passes {message.tokens}")
        elif isinstance(message, wire.LogLevel):
            self.note(f"level {message.level}")
        elif isinstance(message, wire.Quit):
            self.note("quit")
            time.sleep(self.args.quit_s)
            self.wait_for(self.args.quit_gate)
            if self.args.linger:
                self.socket.shutdown(socket.SHUT_RDWR)
                time.sleep(600)
            sys.exit(0)

    def load(self, message: wire.Load) -> None:
        args = self.args
        self.note(f"load {message.model_path} cold={message.cache.cold_dir}")
        self.note(f"passes {message.pass_limit}")
        self.note(f"first live={message.budget.live} most={message.budget.most}")
        if args.stop_on_load and "stopping" not in (Path(args.notes) / "notes.txt").read_text():
            self.note("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(args.load_s)
        self.wait_for(args.load_gate)
        if args.load_fails:
            lasting = args.load_fails.startswith("lasting")
            self.send(wire.LoadFailed(args.load_fails, adapter=bool(message.adapter), lasting=lasting))
            sys.exit(1)
        if args.crash_on_load:
            print("Traceback: the stub was told to crash", file=sys.stderr, flush=True)
            os._exit(3)
        info = wire.ModelInfo(
            model_id=message.model_id,
            model_type="stub",
            context_length=args.context,
            vocab_size=10,
            weight_bytes=0,
            kv_bytes_per_token=0,
            kv_reuse="",
            namespace="",
            block_size=message.cache.block_size,
            backend="none",
            note="a stub",
        )
        self.send(wire.LoadProgress(stage="stub"))
        self.send(wire.Loaded(info=info))

    def generate(self, message: wire.Generate) -> None:
        prompt = message.request.prompt
        text = prompt.text if isinstance(prompt, RawPrompt) else script_of(prompt)
        words = text.split()
        if words[:1] == ["late"]:
            time.sleep(0.5)
        elif words[:1] == ["poison"]:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        self.event(message.id, Progress(done=len(words), total=len(words)))
        reason = "length" if "cut" in words else "stop"
        for word in words:
            if message.id in self.cancelled:
                return
            verb, _, value = word.partition(":")
            if verb == "sleep":
                time.sleep(float(value))
            elif verb == "gate":
                self.wait_for("gate")
            elif verb == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif verb == "exit":
                os._exit(int(value))
            elif verb == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(5)  # Another thread takes the signal, and this one runs on for a moment.
            elif verb == "steps":
                # Work with no event to show for it, as a long tool call is.
                for step in range(int(value)):
                    self.send(wire.Alive(steps=step + 1))
                    time.sleep(0.1)
            elif verb == "hang":
                return
            elif verb == "nonsense":
                with self.lock:
                    self.socket.sendall(b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")
            elif verb == "fail":
                return self.event(message.id, Failed(code="internal", message="told to fail"))
            elif verb == "leave":
                self.send(wire.LoadFailed(message=value))
                os._exit(5)
            elif verb == "fault":
                self.send(wire.GpuFault("[METAL] it hangs.", "It helps to rest.", int(value)))
                os._exit(wire.GPU_FAULT_STATUS)
            elif verb == "limit":
                self.event(message.id, TextDelta(text=str(message.request.sampling.max_tokens)))
            elif verb == "cut":
                break
            elif verb == "think":
                self.event(message.id, ReasoningDelta(text=value))
            elif verb == "reserve":
                self.send(wire.Reserve(ticket=message.id, nbytes=int(value)))
                with self.granted:
                    self.granted.wait_for(lambda: message.id in self.grants, 600)
                self.event(message.id, TextDelta(text=str(self.grants[message.id])))
            elif verb == "want":
                self.send(wire.Wants(ticket=message.id, nbytes=int(value)))
                with self.granted:
                    self.granted.wait_for(lambda: message.id in self.answered, 600)
            else:
                self.event(message.id, TextDelta(text=word))
        usage = Usage(prompt_tokens=len(words), completion_tokens=len(words))
        self.event(message.id, Finished(reason=reason, usage=usage))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--load-s", type=float, default=0)
    parser.add_argument("--load-gate", default="", help="a file in --notes that loading waits for")
    parser.add_argument("--device", default="16000,16000", help="MB in all, MB available")
    parser.add_argument("--stop-on-load", action="store_true", help="stop in the middle of the first load")
    parser.add_argument("--load-peak", default="0", help="MB that loading took at most")
    parser.add_argument("--memory", default="0,0", help="MB of weights and KV, MB of the hot tier")
    parser.add_argument("--quit-s", type=float, default=0)
    parser.add_argument("--quit-gate", default="", help="a file in --notes that its end waits for")
    parser.add_argument("--linger", action="store_true", help="live on once it has hung up")
    parser.add_argument("--load-fails", default="")
    parser.add_argument("--crash-on-load", action="store_true")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--notes", default="")
    parser.add_argument("--unread", action="store_true", help="exit before reading a frame")
    args = parser.parse_args()
    if args.unread:
        connection = socket.socket(fileno=args.fd)
        connection.sendall(wire.encode(wire.Device(backend="none", total=1, available=1)))
        connection.recv(1)
        sys.exit("the stub left frames unread")
    Stub(args).run()


if __name__ == "__main__":
    main()
