// Streamlit calls this at every change of a mount's data, and the returned function when it goes.
const parts = new WeakMap();
const KINDS = { strip: stripPart, cursor: cursorPart, plot: plotPart };

export default function (component) {
  const { parentElement } = component;
  const data = component.data instanceof Uint8Array
    ? JSON.parse(new TextDecoder().decode(component.data)) : component.data;
  const g = group(data.group);
  let part = parts.get(parentElement);
  if (!part) {
    part = KINDS[data.role](g, parentElement.querySelector(".root"));
    parts.set(parentElement, part);
    g.parts.add(part);
  }
  part.data(data, component);
  return () => {
    part.stop?.();
    g.parts.delete(part);
    parts.delete(parentElement);
  };
}
