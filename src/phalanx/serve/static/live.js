"use strict";
// Renews a page from the stream of server-sent events that its body names. The server sends HTML whose texts are escaped
// already, by the id of the element that shows it, and charts as JSON.
(() => {
  const connection = document.getElementById("connection");
  const STALE_AFTER_S = 10;
  let skewS = 0, heardAt = null;

  const formatAge = (seconds) => {
    if (seconds < -1) return formatAge(-seconds).replace(/^(.*) ago$/, "in $1");
    if (seconds < 1) return "now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    return seconds < 172800 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
  };
  const showAges = () => {
    const now = Date.now() / 1000 + skewS;
    for (const element of document.querySelectorAll("[data-time]")) {
      const age = now - Number(element.dataset.time);
      element.textContent = formatAge(age);
      if (element.dataset.staleAfter) element.classList.toggle("stale", age > Number(element.dataset.staleAfter));
    }
    if (!document.body.dataset.events) return;
    const silent = heardAt === null ? null : (performance.now() - heardAt) / 1000;
    const lost = silent !== null && silent > STALE_AFTER_S;
    document.body.classList.toggle("lost", lost);
    const text = silent === null ? "connecting" : lost ? `no connection: values are ${formatAge(silent).replace(" ago", "")} old` : "live";
    if (connection.textContent !== text) connection.textContent = text;
  };

  const replace = (element, html) => {
    const ticked = new Set([...element.querySelectorAll("input:checked")].map((input) => input.value));
    const open = new Set([...element.querySelectorAll("details[open]")].map((each) => each.id).filter(Boolean));
    const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key ?? document.activeElement.value : null;
    element.innerHTML = html;
    for (const input of element.querySelectorAll("input[type=checkbox]")) input.checked = ticked.has(input.value);
    for (const each of element.querySelectorAll("details")) if (open.has(each.id)) each.open = true;
    if (focused) [...element.querySelectorAll("input, [data-key]")].find((each) => (each.dataset.key ?? each.value) === focused)?.focus();
    phalanxCharts.layOutBars(element);
  };
  const showCharts = ({ html, charts }) => {
    const box = document.getElementById("charts");
    if (html !== undefined) {
      box.innerHTML = html;
      drawnCharts = phalanxCharts.drawAll(box);
      return;
    }
    const figures = [...box.querySelectorAll("figure.chart")];
    charts.forEach(({ json, description, rows }, index) => {
      drawnCharts[index].update(json);
      figures[index].querySelector(".canvas").setAttribute("aria-label", description);
      figures[index].querySelector("tbody").innerHTML = rows;
    });
  };
  const show = (message) => {
    skewS = message.now - Date.now() / 1000;
    heardAt = performance.now();
    for (const [id, html] of Object.entries(message.sections ?? {})) {
      const element = document.getElementById(id);
      if (element) replace(element, html);
    }
    if (message.charts) showCharts(message.charts);
    document.dispatchEvent(new CustomEvent("phalanx-message", { detail: message }));
    showAges();
  };

  const follow = (address) => {
    const stream = new EventSource(address);
    stream.onmessage = (event) => show(JSON.parse(event.data));
    // the browser connects again by itself, unless the server has refused
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 5000, address); };
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    event.preventDefault();
    if (button.form && !button.form.reportValidity()) return;
    if (button.dataset.confirm && !confirm(button.dataset.confirm)) return;
    const values = button.form ? Object.fromEntries(new FormData(button.form)) : { ...button.dataset };
    button.disabled = true;
    const answer = document.getElementById("answer");
    try {
      const response = await fetch(button.dataset.action, { method: "POST", body: new URLSearchParams(values) });
      answer.textContent = await response.text();
      if (response.ok && button.form) button.form.reset();
    } catch {
      answer.textContent = "The server does not answer.";
    }
    button.disabled = false;
  });

  if (document.body.dataset.events) follow(document.body.dataset.events);
  showAges();
  setInterval(showAges, 1000);
})();
