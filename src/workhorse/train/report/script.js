// The values at the pointer, or at the step that arrow keys choose, and the slider of samples.
const make = (name, properties) => Object.assign(document.createElement(name), properties);
const tip = make("div", { className: "tip" });
const nearest = (places, x) =>
  places.reduce((best, place, at) => (Math.abs(place.x - x) < Math.abs(places[best].x - x) ? at : best), 0);

for (const svg of document.querySelectorAll("figure svg")) {
  const { width, height } = svg.viewBox.baseVal;
  const lines = [...svg.querySelectorAll("[data-values]")].map((line) => (
    { color: line.classList[0], name: line.dataset.name, values: JSON.parse(line.dataset.values), places: [...line.points] }));
  const longest = lines.reduce((one, other) => (other.values.length > one.values.length ? other : one));
  const pointer = document.createElementNS(svg.namespaceURI, "path");
  pointer.setAttribute("class", "grid");
  let at = longest.values.length;

  const show = (clientX) => {
    const box = svg.getBoundingClientRect();
    at = nearest(longest.places, ((clientX - box.left) / box.width) * width);
    const across = longest.places[at].x;
    pointer.setAttribute("d", `M${across},0V${height - 22}`);
    svg.append(pointer);
    tip.replaceChildren(`step ${longest.values[at][0].toLocaleString("en")}`);
    for (const { color, name, values, places } of lines) {
      const own = nearest(places, across);
      if (Math.abs(places[own].x - across) > width / 40) continue;
      tip.append(make("i", { className: color, textContent: "\n● " }), `${name} ${+values[own][1].toPrecision(5)}`);
    }
    document.body.append(tip);
    const left = box.left + (across / width) * box.width + 12;
    tip.style.left = `${Math.max(4, left + tip.offsetWidth > innerWidth ? left - 24 - tip.offsetWidth : left)}px`;
    tip.style.top = `${box.top + 8}px`;
  };
  svg.onpointermove = ({ clientX }) => show(clientX);
  svg.onpointerleave = svg.onblur = () => [pointer, tip].forEach((one) => one.remove());
  svg.onkeydown = ({ key }) => {
    const next = longest.places[at + { ArrowLeft: -1, ArrowRight: 1 }[key]];
    if (next) show(svg.getBoundingClientRect().left + (next.x / width) * svg.clientWidth);
  };
}

for (const box of document.querySelectorAll(".times")) {
  const tables = [...box.children];
  const slider = make("input", { type: "range", max: tables.length - 1, value: tables.length - 1 });
  const [label, time] = [make("label"), make("output")];
  slider.oninput = () => {
    tables.forEach((table, index) => (table.hidden = index !== +slider.value));
    slider.ariaValueText = time.value = tables[slider.value].dataset.time;
  };
  slider.oninput();
  label.append("Time", slider, time);
  if (tables.length > 1) box.prepend(label);
}
