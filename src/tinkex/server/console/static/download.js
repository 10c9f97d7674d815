// A chart as a file: its picture as SVG or PNG with title and legend, its points as CSV or JSON lines.
"use strict";

const PICTURE = { width: 900, height: 420, head: 34, row: 20 };

function download(chart, kind) {
  const file = `${chart.title.replace(/[^\w.-]+/g, "-").slice(0, 80) || "chart"}.${kind}`;
  if (kind === "png") { asPng(chart, (blob) => give(blob, file)); return; }
  const text = { svg: asSvg, csv: asCsv, jsonl: asJsonl }[kind](chart);
  give(new Blob([text], { type: { svg: "image/svg+xml", csv: "text/csv", jsonl: "application/jsonl" }[kind] }), file);
}

function give(blob, file) {
  const link = made("a", { href: URL.createObjectURL(blob), download: file });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ------------------------------------------------------------------------ points

function rows(chart) {
  return chart.series.flatMap((one) => one.steps.map((step, i) => ({ run: one.name, metric: chart.title, step, value: one.values[i], time: one.at[i] })));
}

function asJsonl(chart) { return rows(chart).map((row) => `${JSON.stringify(row)}\n`).join(""); }

function asCsv(chart) {
  const lines = rows(chart).map((row) => Object.values(row).map(cell).join(","));
  return `run,metric,step,value,time\n${lines.join("\n")}\n`;
}

// A text that begins like a formula is not to be one in a spreadsheet.
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// ------------------------------------------------------------------------ pictures

function picture(pen, chart) {
  const { width, height, head, row } = PICTURE;
  const bottom = 22 + row * chart.series.length;
  const scene = sceneOf(chart.lines(), width, height + row * chart.series.length, chart.view, { right: 16, top: head, bottom: bottom + 8 });
  pen.fillStyle = theme("--card");
  pen.fillRect(0, 0, scene.width, scene.height);
  if (scene.isEmpty) return;
  const below = scene.height - row * chart.series.length;
  // The labels of the axis stand above the legend.
  paint(pen, { ...scene, height: below }, { series: chart.series, view: chart.view });
  pen.textAlign = "left";
  pen.font = `600 14px ${theme("font")}`;
  pen.fillStyle = theme("--ink");
  pen.fillText(chart.title, 16, 22);
  pen.font = `12px ${theme("font")}`;
  chart.series.forEach((one, index) => {
    const y = below + row * index + 8;
    pen.fillStyle = runColor(one.color);
    spot(pen, 24, y - 4, 5);
    pen.fillStyle = theme("--ink");
    pen.fillText(`${one.name}${one.isBaseline ? " (baseline)" : ""}`.slice(0, 120), 36, y);
  });
}

function asPng(chart, done) {
  const canvas = made("canvas");
  canvas.width = 2 * PICTURE.width;
  canvas.height = 2 * (PICTURE.height + PICTURE.row * chart.series.length);
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  picture(pen, chart);
  canvas.toBlob(done, "image/png");
}

function asSvg(chart) {
  const pen = new SvgPen();
  picture(pen, chart);
  const height = PICTURE.height + PICTURE.row * chart.series.length;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${PICTURE.width} ${height}" width="${PICTURE.width}" height="${height}">\n${pen.parts.join("\n")}\n</svg>\n`;
}

// As much of a canvas's pen as `paint` uses, written down as SVG.
class SvgPen {
  constructor() { this.parts = []; this.dash = []; this.path = []; this.textAlign = "left"; this.lineWidth = 1; this.globalAlpha = 1; }
  setLineDash(dash) { this.dash = dash; }
  beginPath() { this.path = []; }
  moveTo(x, y) { this.path.push(`M${this.near(x)} ${this.near(y)}`); }
  lineTo(x, y) { this.path.push(`L${this.near(x)} ${this.near(y)}`); }
  arc(x, y, size) { this.circle = { cx: this.near(x), cy: this.near(y), r: size }; }
  stroke() {
    const facts = { d: this.path.join(""), fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth };
    if (this.globalAlpha < 1) facts["stroke-opacity"] = this.globalAlpha;
    if (this.dash.length) facts["stroke-dasharray"] = this.dash.join(" ");
    this.add("path", facts);
  }
  fill() { this.add("circle", { ...this.circle, fill: this.fillStyle }); }
  fillRect(x, y, width, height) { this.add("rect", { x, y, width, height, fill: this.fillStyle }); }
  fillText(text, x, y) {
    const [, weight, size] = /^(\d{3} )?(\d+)px/.exec(this.font);
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    this.add("text", { x: this.near(x), y: this.near(y), fill: this.fillStyle, "font-family": "sans-serif", "font-size": size, "font-weight": (weight || "400").trim(), "text-anchor": anchor }, text);
  }
  near(number) { return Number(number.toFixed(2)); }
  add(kind, facts, text = "") {
    const escaped = (value) => String(value).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "");
    const given = Object.entries(facts).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    this.parts.push(`<${kind}${given}>${escaped(text)}</${kind}>`);
  }
}
