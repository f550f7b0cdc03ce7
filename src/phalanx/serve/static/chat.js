// The chat of a run's page: posts the dialogue, and shows the answer as its pieces come.
"use strict";
(() => {
  const box = document.getElementById("chat");
  if (!box) return;
  const log = box.querySelector("[role=log]"), form = box.querySelector("form");
  const [send, stop, clear] = form.querySelectorAll("button");
  let messages = [], abort = null;

  const show = (kind, text) => {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = text;
    log.append(line);
    return line;
  };
  const readEvents = async (response, handle) => {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) handle(JSON.parse(event.slice("data: ".length)));
    }
  };
  const ask = async (content) => {
    messages.push({ role: "user", content });
    show("user", content);
    const line = show("assistant", "");
    abort = new AbortController();
    send.disabled = !(stop.disabled = false);
    try {
      const body = JSON.stringify({ messages });
      const response = await fetch(box.dataset.address, { method: "POST", body, signal: abort.signal });
      if (!response.ok) throw new Error(await response.text());
      await readEvents(response, ({ text, note, error }) => {
        if (text) line.textContent += text;
        if (note ?? error) show(error ? "problem" : "note", note ?? error);
      });
    } catch (error) {
      if (error.name !== "AbortError") show("problem", error.message);
    }
    if (line.textContent) messages.push({ role: "assistant", content: line.textContent });
    else messages.pop();
    send.disabled = !(stop.disabled = true);
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const content = form.message.value.trim();
    if (!content || send.disabled) return;
    form.reset();
    ask(content);
  });
  form.message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stop.addEventListener("click", () => abort?.abort());
  clear.addEventListener("click", () => {
    abort?.abort();
    messages = [];
    log.replaceChildren();
  });
})();
