"use strict";
// Draws the heat map that messages of the page of nodes carry.
(() => {
  // One cell a device, in the order of the table; a node's cells stay together.
  const CELL = 11, GAP = 2, NODE_GAP = 6;
  let heatMap = null;
  const cellColor = (value) => value === null ? "#8a929a55" : `hsl(${225 - 2.1 * value} 68% ${58 - value * 0.1}%)`;
  const drawHeatMap = () => {
    const box = document.getElementById("heat-map");
    if (!box || !heatMap) return;
    let canvas = box.querySelector("canvas");
    if (!canvas) {
      canvas = document.createElement("canvas");
      box.append(canvas);
      const tip = document.createElement("div");
      tip.className = "tip";
      tip.hidden = true;
      box.append(tip);
      canvas.addEventListener("pointermove", (event) => {
        const hit = heatMap.cells.find(({ x, y }) => event.offsetX >= x && event.offsetX < x + CELL && event.offsetY >= y && event.offsetY < y + CELL);
        tip.hidden = !hit;
        if (!hit) return;
        tip.textContent = `${hit.name} device ${hit.device}: ${hit.value === null ? "missing" : `${hit.value}%`} (${hit.state})`;
        tip.style.left = `${Math.min(hit.x + 16, box.clientWidth - 220)}px`;
        tip.style.top = `${hit.y + 16}px`;
      });
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    }
    const width = box.clientWidth, cells = [];
    let x = 0, y = 0;
    for (const [name, state, values] of heatMap.nodes) {
      if (x > 0 && x + values.length * (CELL + GAP) > width) { x = 0; y += CELL + NODE_GAP; }
      values.forEach((value, device) => {
        if (x + CELL > width) { x = 0; y += CELL + GAP; }
        cells.push({ name, state, device, value, x, y });
        x += CELL + GAP;
      });
      x += NODE_GAP;
    }
    heatMap.cells = cells;
    const zoom = devicePixelRatio, height = y + CELL;
    if (canvas.width !== Math.round(width * zoom) || canvas.height !== Math.round(height * zoom)) {
      canvas.width = Math.round(width * zoom); canvas.height = Math.round(height * zoom);
      canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(zoom, 0, 0, zoom, 0, 0);
    context.clearRect(0, 0, width, height);
    for (const cell of cells) {
      context.fillStyle = cellColor(cell.value);
      context.fillRect(cell.x, cell.y, CELL, CELL);
      if (!["healthy", "no reading", "stale"].includes(cell.state)) { context.strokeStyle = "#c0322b"; context.lineWidth = 2; context.strokeRect(cell.x + 1, cell.y + 1, CELL - 2, CELL - 2); }
    }
  };
  addEventListener("resize", drawHeatMap);
  document.addEventListener("phalanx-message", (event) => {
    if (event.detail.heatMap) { heatMap = event.detail.heatMap; drawHeatMap(); }
  });
})();
