// A table of traces whose rows open; text only ever enters through textContent.
const SVG = "http://www.w3.org/2000/svg";

function spark(values) {
  const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "polyline");
  svg.setAttribute("viewBox", "0 0 96 20");
  const points = values.map((v, i) => `${(i / Math.max(values.length - 1, 1)) * 94 + 1},${19 - Math.min(Math.max(v, 0), 1) * 18}`);
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

function cell(value) {
  const td = document.createElement("td");
  if (value === null || value === undefined) { td.textContent = "–"; return td; }
  if (Array.isArray(value.spark)) { td.append(spark(value.spark)); td.className = "spark"; }
  else if (value.share !== undefined) {
    const bar = document.createElement("u");
    bar.style.width = `${Math.round(value.share * 44)}px`;
    td.append(bar, `${Math.round(value.share * 100)} %`);
    td.className = "share";
  } else {
    td.textContent = value.text;
    if (value.kind) td.className = value.kind;
  }
  if (value.title) td.title = value.title;
  return td;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".root");
  const table = document.createElement("table"), head = document.createElement("thead"), body = document.createElement("tbody");
  const titles = document.createElement("tr");
  for (const [name, about] of data.columns) {
    const th = document.createElement("th");
    th.textContent = name;
    th.title = about;
    titles.append(th);
  }
  head.append(titles);
  data.rows[0]?.cells.forEach((c, i) => { if (["number", "warn"].includes(c?.kind)) titles.children[i].className = "number"; });
  data.rows.forEach((row) => {
    const tr = document.createElement("tr");
    tr.tabIndex = 0;
    tr.dataset.id = row.id;
    tr.append(...row.cells.map(cell));
    tr.addEventListener("click", () => setTriggerValue("open", row.id));
    tr.addEventListener("keydown", (event) => {
      if (event.key === "Enter") setTriggerValue("open", row.id);
      else if (event.key === "ArrowDown" || event.key === "j") tr.nextElementSibling?.focus();
      else if (event.key === "ArrowUp" || event.key === "k") tr.previousElementSibling?.focus();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    body.append(tr);
  });
  table.append(head, body);
  const at = [...root.querySelectorAll("tr")].indexOf(parentElement.activeElement);
  root.replaceChildren(table);
  if (at > 0) root.querySelectorAll("tr")[at]?.focus();
}
