"use strict";
// Tooltips for mouse, touch and arrow keys; the axes of the scatter plot; light and dark. The page
// is whole without it: what it adds are ways to look.
const root = document.documentElement;
const tip = document.getElementById("tip");

function show(mark) {
  document.querySelector(".mark.chosen")?.classList.remove("chosen");
  tip.hidden = !mark;
  if (!mark) return;
  mark.classList.add("chosen");
  tip.textContent = mark.dataset.tip;
  const box = mark.getBoundingClientRect();
  const left = box.left + box.width / 2 - tip.offsetWidth / 2;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4)) + "px";
  const above = box.top - tip.offsetHeight - 8;
  tip.style.top = (above > 4 ? above : Math.min(box.bottom + 8, innerHeight - tip.offsetHeight)) + "px";
}

for (const plot of document.querySelectorAll(".plot")) {
  let at = -1;
  for (const event of ["pointerover", "click"])
    plot.addEventListener(event, (e) => show(e.target.closest(".mark")));
  for (const event of ["pointerleave", "blur"]) plot.addEventListener(event, () => show(null));
  plot.addEventListener("keydown", (e) => {
    const marks = plot.querySelectorAll(".mark");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Escape") show(null);
    if (!step || !marks.length) return;
    e.preventDefault();
    at = (at + step + marks.length) % marks.length;
    show(marks[at]);
  });
}
addEventListener("scroll", () => show(null), { passive: true });

const goals = JSON.parse(document.getElementById("goals")?.textContent ?? "null");
if (goals) {
  const figure = document.querySelector("#front figure");
  const svg = figure.querySelector("svg");
  const dots = [...svg.querySelectorAll("circle.mark")];
  const chosen = { x: document.getElementById("axis-x"), y: document.getElementById("axis-y") };
  const element = (name, attributes, text) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text) made.textContent = text;
    return made;
  };
  const draw = () => {
    const [x, y] = [goals[chosen.x.value], goals[chosen.y.value]];
    dots.forEach((dot, i) => {
      dot.setAttribute("cx", x.at[i] + "%");
      dot.setAttribute("cy", 100 - y.at[i] + "%");
    });
    svg.querySelector(".ticks-x").replaceChildren(
      ...x.ticks.map(([at, text]) => element("text", { x: at + "%", y: "100%", dy: 18 }, text)));
    svg.querySelector(".ticks-y").replaceChildren(
      ...y.ticks.map(([at, text]) => element("text", { x: 0, dx: -8, y: 100 - at + "%" }, text)));
    figure.querySelector(".axis.x").textContent = x.label;
    figure.querySelector(".axis.y").textContent = y.label;
    svg.querySelectorAll("line.front").forEach((line) => line.remove());
    // from the best in x on, every point that is better in y than all before
    const goodness = (goal, i) => (goal.more ? goal.at[i] : -goal.at[i]);
    const order = dots.map((_, i) => i).sort((a, b) =>
      goodness(x, b) - goodness(x, a) || goodness(y, b) - goodness(y, a));
    let last = null;
    for (const i of order) {
      if (last !== null && goodness(y, i) <= goodness(y, last)) continue;
      if (last !== null)
        dots[0].before(element("line", { class: "front",
          x1: x.at[last] + "%", y1: 100 - y.at[last] + "%", x2: x.at[i] + "%", y2: 100 - y.at[i] + "%" }));
      last = i;
    }
  };
  for (const select of Object.values(chosen)) select.addEventListener("change", draw);
  document.querySelector(".axes").hidden = false;
  draw();
}

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
// for whoever opens the page to test it
root.dataset.marks = document.querySelectorAll(".mark").length;
root.dataset.width = innerWidth;
root.dataset.overflow = root.scrollWidth - root.clientWidth;
