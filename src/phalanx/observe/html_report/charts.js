"use strict";
// Draws charts with uPlot from the JSON that chart.py describes. `phalanxCharts.draw(figure, chart)` returns an object
// whose `update(chart)` shows newer JSON. Text reaches the page only as textContent, color only through style objects.
const phalanxCharts = (() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const format = (value) => {
    if (value == null) return "not finite";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-2) return String(Number(value.toPrecision(4))).length < 7 ? String(Number(value.toPrecision(4)))
      : value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
    return String(Number(value.toPrecision(4)));
  };
  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    node.className = className;
    node.textContent = text ?? "";
    return node;
  };

  // MARKS: how an event looks on the canvas, and its sign in the legend.
  const triangle = (context, x, y, width, height) => {
    context.beginPath();
    context.moveTo(x - width, y); context.lineTo(x + width, y); context.lineTo(x, y + height);
    context.fill();
  };
  const MARKS = {
    repeated: { color: "bad", sign: "▒", behind: true, paint(context, x, y, box, zoom, end) {
      context.globalAlpha = 0.09;
      context.fillRect(x, box.top, Math.max(1.5 * zoom, end - x), box.height);
    } },
    restart: { color: "bad", sign: "┆", behind: true, paint(context, x, y, box, zoom) {
      context.setLineDash([4 * zoom, 3 * zoom]);
      context.beginPath(); context.moveTo(x, box.top); context.lineTo(x, box.top + box.height); context.stroke();
    } },
    nonfinite: { color: "bad", sign: "▼", paint(context, x, y, box, zoom) { triangle(context, x, box.top, 4 * zoom, 7 * zoom); } },
    checkpoint: { color: "checkpoint-stall", sign: "▲", paint(context, x, y, box, zoom) {
      triangle(context, x, box.top + box.height, 3.4 * zoom, -6 * zoom);
    } },
    best: { color: "validation", sign: "○", paint(context, x, y, box, zoom) {
      context.beginPath(); context.arc(x, y, 4.6 * zoom, 0, 2 * Math.PI); context.stroke();
    } },
  };
  const paintMarks = (plot, marks, behind) => {
    const context = plot.ctx, box = plot.bbox, zoom = uPlot.pxRatio;
    context.save();
    context.beginPath(); context.rect(box.left - 5 * zoom, box.top - 5 * zoom, box.width + 10 * zoom, box.height + 10 * zoom);
    context.clip();
    for (const mark of marks) {
      const kind = MARKS[mark.kind];
      if (Boolean(kind.behind) !== behind) continue;
      const at = (value, axis) => value == null ? 0 : plot.valToPos(value, axis, true);
      context.save();
      context.fillStyle = context.strokeStyle = color(kind.color);
      context.lineWidth = 1.4 * zoom;
      kind.paint(context, at(mark.x, "x"), at(mark.y, "y"), box, zoom, at(mark.xEnd, "x"));
      context.restore();
    }
    context.restore();
  };

  // Areas are drawn as sums from the top of the stack down, each over the one before.
  const isStacked = (chart) => chart.series.some((series) => series.style === "area");
  const shownSeries = (chart) => isStacked(chart) ? [...chart.series].reverse() : chart.series;
  const columns = (chart) => {
    if (!isStacked(chart)) return uPlot.join(chart.series.map((series) => [series.x, series.y]));
    const sums = [];
    for (const series of chart.series) {
      const below = sums[sums.length - 1];
      sums.push(series.y.map((value, index) => value + (below ? below[index] : 0)));
    }
    return [chart.series[0].x, ...sums.reverse()];
  };
  const seriesOptions = (series) => {
    const area = series.style === "area", finite = series.y.filter((value) => value != null).length;
    const stroke = () => color(area ? "paper" : series.color) + (series.style === "faint" ? "57" : "");
    return {
      label: series.label,
      stroke,
      width: area ? 0.5 : series.style === "faint" ? 1 : 1.9,
      fill: area ? () => color(series.color) : undefined,
      points: { show: !area && (finite === 1 || (series.style === "dots" && finite <= 60)), size: 6, fill: stroke },
    };
  };

  const legend = (chart) => {
    const box = element("span", "keys");
    const add = (label, sign, name, faint) => {
      const key = element("i", sign ? "sign" : "stroke", sign);
      key.style.color = `var(--${name})`;
      if (faint) key.style.opacity = 0.34;
      const item = element("span", "");
      item.append(key, label);
      box.append(item);
    };
    for (const { label, color, style } of chart.series) if (label) add(label, "", color, style === "faint");
    for (const [kind, label] of Object.entries(chart.markLabels)) add(label, MARKS[kind].sign, MARKS[kind].color);
    return box;
  };

  const showTip = (plot, chart, tip) => {
    const { left, top, idxs } = plot.cursor;
    tip.hidden = left < 0 || left == null;
    if (tip.hidden) return;
    const data = plot.data, unit = chart.unit ? ` ${chart.unit}` : "";
    const x = plot.posToVal(left, "x");
    const lines = [`${chart.xLabel} ${chart.xLabel === "step" ? Math.round(x) : format(x)}`];
    shownSeries(chart).forEach((series, index) => {
      const at = idxs[index + 1];
      if (!series.label || at == null) return;
      const below = isStacked(chart) ? data[index + 2] : undefined;
      const value = data[index + 1][at];
      lines.push(`${series.label} ${format(value == null ? value : value - (below ? below[at] : 0))}${unit}`);
    });
    for (const mark of chart.marks) {
      const from = plot.valToPos(mark.x, "x"), to = mark.xEnd == null ? from : plot.valToPos(mark.xEnd, "x");
      if (left >= from - 4 && left <= to + 4 && lines.length < 14) lines.push(mark.label);
    }
    tip.replaceChildren(...lines.map((line) => element("div", "", line)));
    const flip = left > plot.over.clientWidth / 2;
    tip.style.top = `${top + 12}px`;
    tip.style.left = flip ? "auto" : `${plot.over.offsetLeft + left + 14}px`;
    tip.style.right = flip ? `${plot.root.clientWidth - plot.over.offsetLeft - left + 14}px` : "auto";
  };

  const AXIS = { stroke: () => color("soft"), font: "11px system-ui, sans-serif",
    grid: { stroke: () => color("rule"), width: 1 }, ticks: { show: false } };
  // What a new plot is needed for; all else is data.
  const shape = ({ series, log, markLabels }) =>
    JSON.stringify([series.map(({ label, color, style }) => [label, color, style]), log, markLabels]);
  const draw = (figure, first) => {
    let chart = first, plot = null, drawn = "";
    const canvas = figure.querySelector(".canvas"), tip = element("div", "tip");
    const size = () => ({ width: canvas.clientWidth, height: canvas.clientHeight });
    const build = () => {
      plot?.destroy();
      drawn = shape(chart);
      figure.querySelector(".keys")?.remove();
      figure.querySelector("figcaption").append(legend(chart));
      const ends = (data) => [data[0][0], data[0][data[0].length - 1]];
      plot = new uPlot({
        ...size(),
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
        scales: {
          // the whole axis unless a part of it was chosen with the pointer; a double click shows all again
          x: { time: false, range: (u, low, high) => {
            const [start, end] = ends(u.data);
            return start === end || (low === start && high === end) ? chart.xRange : [low, high];
          } },
          y: { distr: chart.log ? 3 : 1, range: () => chart.yRange },
        },
        axes: [
          { ...AXIS, grid: { show: false }, incrs: [1, 2, 5].flatMap((n) => [...Array(15).keys()].map((e) => n * 10 ** e))
              .sort((a, b) => a - b), size: 28, space: 70, values: (u, ticks) => ticks.map((tick) => tick == null ? "" : format(tick)) },
          { ...AXIS, size: 54, values: (u, ticks) => ticks.map((tick) => tick == null ? "" : format(tick)) },
        ],
        series: [{ label: "step" }, ...shownSeries(chart).map(seriesOptions)],
        hooks: {
          // areas would hide what is behind them
          drawAxes: [(u) => isStacked(chart) || paintMarks(u, chart.marks, true)],
          draw: [(u) => { if (isStacked(chart)) paintMarks(u, chart.marks, true); paintMarks(u, chart.marks, false); }],
          setCursor: [(u) => showTip(u, chart, tip)],
        },
      }, columns(chart), canvas);
      canvas.append(tip);
      tip.hidden = true;
    };
    build();
    new ResizeObserver(() => plot.setSize(size())).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
    return {
      get plot() { return plot; },
      update(next) {
        const same = shape(next) === drawn;
        chart = next;
        if (same) plot.setData(columns(chart)); else build();
      },
    };
  };

  const drawAll = (root) => [...root.querySelectorAll("figure.chart")].map((figure) =>
    draw(figure, JSON.parse(figure.querySelector("script[type='application/json']").textContent)));
  const layOutBars = (root) => {
    for (const part of root.querySelectorAll(".bar [data-share]")) part.style.flex = part.dataset.share;
  };
  return { draw, drawAll, layOutBars };
})();

phalanxCharts.layOutBars(document);
let drawnCharts = phalanxCharts.drawAll(document);
