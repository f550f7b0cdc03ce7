"use strict";
// Values under the pointer. The curves themselves are the data: their pixels are turned back through the axes' scale.
for (const svg of document.querySelectorAll("svg.plot")) {
  const [x0, x1, y0, y1, log] = svg.dataset.scale.split(" ").map(Number);
  const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
  const step = (px) => x0 + ((px - left) / (right - left)) * (x1 - x0);
  const value = (py) => {
    const share = (bottom - py) / (bottom - top);
    return log ? y0 * Math.pow(y1 / y0, share) : y0 + share * (y1 - y0);
  };
  let curves = null, tip = null, cursor = null;
  const read = () => [...svg.querySelectorAll("path[data-label]")].map((path) => {
    const stacked = path.classList.contains("layer");
    let points = path.getAttribute("d").match(/-?[\d.]+,-?[\d.]+/g).map((pair) => pair.split(",").map(Number));
    let under = null;
    if (stacked) { under = points.slice(points.length / 2).reverse(); points = points.slice(0, points.length / 2); }
    return { label: path.dataset.label, points, under };
  });
  const leave = () => { tip?.remove(); cursor?.remove(); tip = cursor = null; };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    curves ??= read();
    const box = svg.getBoundingClientRect(), zoom = box.width / svg.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / zoom;
    if (px < left || px > right || !curves.length) { leave(); return; }
    if (!tip) {
      tip = document.createElement("div"); tip.className = "tip"; svg.parentNode.append(tip);
      cursor = document.createElementNS("http://www.w3.org/2000/svg", "path"); cursor.setAttribute("class", "cursor");
      svg.append(cursor);
    }
    cursor.setAttribute("d", `M${px},${top}V${bottom}`);
    const lines = [`step ${Math.round(step(px))}`];
    for (const { label, points, under } of curves) {
      let best = 0;
      points.forEach((point, index) => { if (Math.abs(point[0] - px) < Math.abs(points[best][0] - px)) best = index; });
      const shown = under ? value(points[best][1]) - value(under[best][1]) : value(points[best][1]);
      lines.push(`${label} ${Number(shown.toPrecision(4))}${svg.dataset.unit ? " " + svg.dataset.unit : ""}`);
    }
    tip.replaceChildren(...lines.map((line) => { const row = document.createElement("div"); row.textContent = line; return row; }));
    const flip = px > (left + right) / 2;
    const offset = svg.parentNode.getBoundingClientRect();
    tip.style.top = `${event.clientY - offset.top + 12}px`;
    tip.style.left = flip ? "auto" : `${event.clientX - offset.left + 14}px`;
    tip.style.right = flip ? `${offset.right - event.clientX + 14}px` : "auto";
  });
}
